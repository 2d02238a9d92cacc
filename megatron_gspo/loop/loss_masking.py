"""Which samples count in the loss is decided here. Their rewards may still count in their group's
statistics.

| response                         | its reward in the group's mean and std | its tokens in the loss |
| -------------------------------- | -------------------------------------- | ---------------------- |
| scored                           | yes                                    | yes                    |
| not scored (verifier failed)     | no                                     | no                     |
| aborted by the engine            | no                                     | no                     |
| cut off, ``truncated: mask``     | yes                                    | no                     |
| a non-finite log-prob            | yes                                    | no                     |
| no tokens                        | yes                                    | there are none         |
| rejected by ``rollout_rs``       | yes                                    | no                     |

The reward of a response that was not scored or not finished is unknown: any number in its place
would shift its group's baseline. The other responses are draws of the policy with a known reward,
which the baseline needs.
"""

from __future__ import annotations

import numpy as np

from megatron_gspo.data.sample import FINISH_REASONS
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import RunError


def mask_samples(
    batch: TrainingBatch, *, step: int, truncated: bool
) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch with an empty ``loss_mask`` of responses that don't count, which reduces N too, and
    ``masked/*`` counts by the first reason that applies.

    Raises RunError if no response with tokens has finite log-probs, whether it counts or not. A
    collective of the batch's group.

    Args:
        truncated: mask responses that were cut off.
        step: steps done, for the message.
    """
    table = batch.table
    finish = {reason: table["finish"] == i for i, reason in enumerate(FINISH_REASONS)}
    responses = batch.responses
    non_finite = responses["loss_mask"] & ~_has_finite_log_probs(batch)
    broken = batch.shared(responses.sums(non_finite)) > 0
    empty = table["trained"] == 0
    if broken.any() and (broken | empty).all():
        raise RunError(
            f"step {step + 1}: no response has finite log-probs under the training engine, so its"
            " weights are broken; look at grad_norm before, lower optimizer.lr, and resume from an"
            " earlier checkpoint"
        )
    reasons = (
        ("empty", empty),
        ("truncated", finish["abort"] | (finish["length"] & truncated)),
        ("unscored", ~np.isfinite(table["reward"])),
        ("non_finite", broken),
    )
    counts: dict[str, float] = {}
    masked = np.zeros(len(batch), dtype=bool)
    for name, applies in reasons:
        counts[f"masked/{name}"] = float(np.count_nonzero(applies & ~masked))
        masked |= applies
    if not (masked & ~empty).any():
        return batch, counts
    is_masked = responses.repeat(masked[responses.positions])
    return batch.with_loss_mask(responses["loss_mask"] & ~is_masked), counts


def _has_finite_log_probs(batch: TrainingBatch) -> np.ndarray:
    """[T] bool: by response token."""
    responses = batch.responses
    finite = np.ones(responses.num_tokens, dtype=np.bool_)
    for name in ("old_log_probs", "ref_log_probs", "teacher_log_probs"):
        if name in responses:
            finite &= np.isfinite(responses[name])
    return finite
