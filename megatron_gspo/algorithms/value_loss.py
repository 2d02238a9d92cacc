"""The loss of a value model (PPO)."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    num_tokens: int | Tensor,
    value_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`1 / (2 num_tokens) sum_t max((V_t - R_t)^2, (clip(V_t, V_old_t +- value_clip) - R_t)^2)`
    over trained tokens.

    The clipped term stops the gradient of values that have moved by more than `value_clip` towards
    their return (OpenAI's baselines; verl's and TRL's `cliprange_value`).

    Args:
        values: [T] with gradient.
        old_values: [T], of the value model before the step's updates.
        returns: [T], see `gae_advantages`.
        loss_mask: [T], 1 at trained tokens; the others are not read.
        num_tokens: trained tokens of the GLOBAL mini-batch, as in `policy_loss`.
        value_clip: None does not clip.

    Returns:
        This micro-batch's share of the loss, and of `critic/loss`, `critic/clip_fraction` and
        `critic/value`, which add up over micro-batches and ranks.

    Raises:
        ValueError: tensors that are not all [T].
    """
    tensors = {"old_values": old_values, "returns": returns, "loss_mask": loss_mask}
    for name, tensor in tensors.items():
        if tensor.shape != values.shape or values.dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, values {tuple(values.shape)}: all must"
                " be [T]"
            )
    trained = loss_mask > 0
    values = torch.where(trained, values, 0)
    returns = torch.where(trained, returns, 0)
    old_values = torch.where(trained, old_values, 0)
    error = (values - returns).square()
    cut = torch.zeros_like(trained)
    if value_clip is not None:
        clipped = (
            old_values + (values - old_values).clamp(-value_clip, value_clip) - returns
        ).square()
        cut = clipped > error
        error = torch.where(cut, clipped, error)
    loss = error.sum() / (2 * num_tokens)
    metrics = {
        "critic/loss": loss.detach(),
        "critic/clip_fraction": cut.sum() / num_tokens,
        "critic/value": values.detach().sum() / num_tokens,
    }
    return loss, metrics
