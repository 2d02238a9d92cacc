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

from dataclasses import replace

import numpy as np

from megatron_gspo.data.sample import FINISH_REASONS, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import RunError


def mask_samples(
    batch: SampleBatch, *, step: int, truncated: bool
) -> tuple[SampleBatch, dict[str, float]]:
    """The samples with an empty ``loss_mask`` where they don't count, which reduces N too, and
    ``masked/*`` counts by the first reason that applies.

    truncated: mask responses that were cut off. step: steps done, for the message. Raises RunError
    if no response has finite log-probs. A collective of the batch's group.
    """
    table = batch.table
    finish = {reason: table["finish"] == i for i, reason in enumerate(FINISH_REASONS)}
    broken = batch.shared(
        {i: not _has_finite_log_probs(sample) for i, sample in batch.held.items()}
    )
    empty = table["trained"] == 0
    reasons = (
        ("empty", empty),
        ("truncated", finish["abort"] | (finish["length"] & truncated)),
        ("unscored", ~np.isfinite(table["reward"])),
        ("non_finite", broken > 0),
    )
    counts: dict[str, float] = {}
    masked = np.zeros(len(batch), dtype=bool)
    for name, applies in reasons:
        counts[f"masked/{name}"] = float(np.count_nonzero(applies & ~masked))
        masked |= applies
    if counts["masked/non_finite"] and masked.all():
        raise RunError(
            f"step {step + 1}: no response has finite log-probs under the training engine, so its"
            " weights are broken; look at grad_norm before, lower optimizer.lr, and resume from an"
            " earlier checkpoint"
        )
    changed = masked & ~empty
    masked_batch = batch.map_packed(
        lambda i, s: replace(s, loss_mask=np.zeros_like(s.loss_mask)) if changed[i] else s
    )
    return masked_batch.with_columns(trained=np.where(masked, 0, table["trained"])), counts


def _has_finite_log_probs(sample: Sample) -> bool:
    values = (sample.old_log_probs, sample.ref_log_probs)
    return all(
        value is None or bool(np.isfinite(value[sample.loss_mask]).all()) for value in values
    )
