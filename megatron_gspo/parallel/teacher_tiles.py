"""A teacher's logits beside the policy's, tile by tile: what a rank adds to both KL divergences
over the vocabulary, and their gradient for the policy's logits.

For the policy's logits x and the teacher's z of one token, with p and t their softmax, m and n their
maxima and ``d_j = (x_j - m) - (z_j - n)``:

    KL(p || t) = sum_j p_j d_j - log sum exp(x - m) + log sum exp(z - n)
    KL(t || p) = -sum_j t_j d_j - log sum exp(z - n) + log sum exp(x - m)

    d KL(p || t) / d x_j = p_j (log p_j - log t_j - KL(p || t))
    d KL(t || p) / d x_j = p_j - t_j

Both sums are of products of a softmax with differences from a maximum, so that they are combined over
tiles and ranks as log-sum-exp is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.kernels import row_kernels_apply
from megatron_gspo.kernels.operators import logit_comparison


@dataclass(frozen=True)
class TeacherRows:
    """Operands of a teacher's logits, of the same tokens and rows of the vocabulary as the
    policy's."""

    hidden: Tensor  # [T, h'] in the dtype of the products
    weight: Tensor  # [rows, h']


@dataclass(frozen=True)
class Comparison:
    """Sums over the rows of tiles or of a rank, [...] of every token; see the module."""

    maximum: Tensor  # n
    total: Tensor  # sum exp(z - n)
    reverse: Tensor  # sum exp(x - m) d
    forward: Tensor  # -sum exp(z - n) d

    def packed(self) -> Tensor:
        """[4, ...]."""
        return torch.stack((self.maximum, self.total, self.reverse, self.forward))

    def summed(self, maximum: Tensor, total: Tensor) -> Comparison:
        """Over the first dimension. maximum, total: m and sum exp(x - m) of the same parts."""
        of_policy = maximum - maximum.amax(0)
        highest = self.maximum.amax(0)
        of_teacher = self.maximum - highest
        shift = of_policy - of_teacher
        factor = of_teacher.exp()
        return Comparison(
            maximum=highest,
            total=(self.total * factor).sum(0),
            reverse=((self.reverse + total * shift) * of_policy.exp()).sum(0),
            forward=((self.forward - self.total * shift) * factor).sum(0),
        )

    def divergences(self, total: Tensor) -> Tensor:
        """[T, 2]: KL(p || t) and KL(t || p), of sums over the whole vocabulary. total: sum exp(x -
        m)."""
        log_ratio = self.total.log() - total.log()
        reverse = self.reverse / total + log_ratio
        forward = self.forward / self.total - log_ratio
        return torch.stack((reverse, forward), dim=1)


def compare_tile(
    statistics: Tensor, logits: Tensor, teacher_logits: Tensor, scratch: Sequence[Tensor]
) -> None:
    """Write `Comparison.packed` of a tile into ``statistics`` [4, t]. Overwrites teacher_logits and
    scratch: two tiles, or none where the kernels run."""
    if row_kernels_apply(logits, "logits"):
        logit_comparison(logits, teacher_logits, statistics)
        return
    softmax = torch.softmax(logits, 1, out=scratch[0])
    teacher_softmax = torch.softmax(teacher_logits, 1, out=scratch[1])
    maximum = logits.amax(1)
    teacher_maximum = teacher_logits.amax(1)
    # The largest entry of a softmax is 1 / sum.
    total = softmax.amax(1).reciprocal_()
    teacher_total = teacher_softmax.amax(1).reciprocal_()
    difference = torch.sub(logits, teacher_logits, out=teacher_logits)
    difference.sub_((maximum - teacher_maximum)[:, None])
    reverse = softmax.mul_(difference).sum(1).mul_(total)
    forward = teacher_softmax.mul_(difference).sum(1).mul_(-teacher_total)
    torch.stack((teacher_maximum, teacher_total, reverse, forward), out=statistics)


@dataclass(frozen=True)
class TeacherFactors:
    """Per token [T]: d loss / d x_j has -p_j * reverse * (z_j - n) - t_j * forward beside what
    `RowFactors` has."""

    maximum: Tensor  # n
    log_total: Tensor  # log sum exp(z - n) over the whole vocabulary
    tile_probabilities: Tensor  # [tiles, T], the teacher's probability of each of the rank's tiles
    reverse: Tensor
    forward: Tensor

    def cut(self, start: int, end: int) -> TeacherFactors:
        """The factors of tokens [start, end), as columns [t, 1]; tile_probabilities as [tiles, t,
        1]."""
        return TeacherFactors(
            maximum=self.maximum[start:end, None],
            log_total=self.log_total[start:end, None],
            tile_probabilities=self.tile_probabilities[:, start:end, None],
            reverse=self.reverse[start:end, None],
            forward=self.forward[start:end, None],
        )

    def packed(self) -> Tensor:
        """[4, T]: n, log_total, reverse and forward."""
        return torch.stack((self.maximum, self.log_total, self.reverse, self.forward))

    def subtract_from(
        self,
        grad_logits: Tensor,
        tile: int,
        softmax: Tensor,
        probability: Tensor,
        teacher_logits: Tensor,
        scratch: Tensor,
    ) -> None:
        """Add a tile's part to grad_logits. softmax: the policy's within the tile, which has this
        probability [t, 1]. Overwrites teacher_logits and scratch."""
        teacher_softmax = torch.softmax(teacher_logits, 1, out=scratch)
        grad_logits.sub_(teacher_softmax.mul_(self.forward * self.tile_probabilities[tile]))
        difference = teacher_logits.sub_(self.maximum).mul_(self.reverse * probability)
        grad_logits.sub_(difference.mul_(softmax))
