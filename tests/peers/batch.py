"""One padded batch [B, R], as the peers take it, and the same packed into our loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    LossExtras,
    Objective,
    finish_metrics,
    policy_loss,
    reduction_of,
)


@dataclass(frozen=True)
class Padded:
    """log-probs and `mask` (float32, 1 where trained) [B, R]; `advantages` [B], one a response,
    or [B, R].
    """

    log_probs: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.mask)

    def rows(self, chosen: Sequence[int] | slice) -> Padded:
        index = chosen if isinstance(chosen, slice) else list(chosen)
        return Padded(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def num_sequences(self) -> int:
        return int((self.mask.sum(1) > 0).sum())

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True)
class Result:
    """`loss`; its `gradient` with respect to the log-probs [B, R]; `metrics`, final figures."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


LENGTHS = (1, 7, 12, 3, 9, 2, 12, 5)


def make_batch(
    *,
    drift: float,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
    dtype: torch.dtype = torch.float64,
) -> Padded:
    """Responses of `lengths` tokens (0: none trained), some masked inside, advantages of both
    signs.

    `drift`: standard deviation of the log-ratios, of the sequences' means and of the tokens.
    """
    g = torch.Generator().manual_seed(seed)
    count = len(lengths)
    width = max(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).float()
    mask[:, 1:] *= (torch.rand((count, width - 1), generator=g) < 0.8).float()
    old = -normal(count, width).abs() - 0.05
    log_probs = old + drift * (normal(count, 1) + normal(count, width))
    ref = log_probs + 0.5 * normal(count, width)
    advantages = normal(count)
    advantages = advantages.abs() * torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(count)[:count]
    cast = (x.to(dtype) for x in (log_probs, old, ref, advantages))
    return Padded(*cast, mask=mask)


def cuts(batch: Padded, size: int) -> list[slice]:
    """Consecutive micro-batches of `size` rows."""
    return [slice(start, start + size) for start in range(0, len(batch), size)]


def ours(
    objective: Objective, batch: Padded, *, micro_batch: int | None = None, with_ref: bool = False
) -> Result:
    """Our loss of the whole mini-batch, summed over micro-batches of `micro_batch` rows."""
    losses = []
    gradients = []
    summed: dict[str, Tensor] = {}
    for cut in cuts(batch, micro_batch or len(batch)):
        piece = batch.rows(cut)
        leaf = piece.log_probs.clone().requires_grad_()
        count, width = piece.mask.shape
        loss, metrics = policy_loss(
            objective,
            log_probs=leaf.flatten(),
            old_log_probs=piece.old_log_probs.flatten(),
            advantages=piece.advantages.reshape(count, -1).expand(count, width).flatten(),
            loss_mask=piece.mask.flatten(),
            segment_ids=torch.arange(count).repeat_interleave(width),
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
            extras=LossExtras(count, piece.ref_log_probs.flatten() if with_ref else None),
        )
        (gradient,) = torch.autograd.grad(loss, leaf)
        losses.append(loss.item())
        gradients.append(gradient)
        for name, value in metrics.items():
            value = value.double()
            if name in summed:
                value = reduction_of(name).combine(summed[name], value)
            summed[name] = value
    return Result(math.fsum(losses), torch.cat(gradients), finish_metrics(summed))


def assert_same(peer: Result, our: Result, *, tolerance: float = 1e-12) -> None:
    """Loss within `tolerance` relative, gradient within `tolerance` of its largest entry."""
    assert abs(peer.loss - our.loss) <= tolerance * abs(our.loss), (
        f"loss {peer.loss!r}, ours {our.loss!r}"
    )
    largest = our.gradient.abs().max()
    worst = (peer.gradient.to(our.gradient.dtype) - our.gradient).abs().max()
    assert largest > 0 and worst <= tolerance * largest, (
        f"gradient off by {worst:.3e}, largest {largest:.3e}"
    )
