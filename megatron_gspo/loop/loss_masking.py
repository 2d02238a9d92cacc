"""Which samples count in the loss is decided here. Their rewards may still count in their group's statistics.

| response                         | its reward in the group's mean and std | its tokens in the loss |
| -------------------------------- | -------------------------------------- | ---------------------- |
| scored                           | yes                                    | yes                    |
| not scored (verifier failed)     | no                                     | no                     |
| aborted by the engine            | no                                     | no                     |
| cut off, ``truncated: mask``     | yes                                    | no                     |
| a non-finite log-prob            | yes                                    | no                     |
| no tokens                        | yes                                    | there are none         |
| rejected by ``rollout_rs``       | yes                                    | no                     |

The reward of a response that was not scored or not finished is unknown: any number in its place would shift its
group's baseline. The other responses are draws of the policy with a known reward, which the baseline needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import RunError


def mask_samples(samples: Sequence[Sample], *, step: int, truncated: bool) -> tuple[list[Sample], dict[str, float]]:
    """The samples with an empty ``loss_mask`` where they don't count, which reduces N too, and ``masked/*`` counts by
    the first reason that applies.

    truncated: mask responses that were cut off. step: steps done, for the message. Raises RunError if no response has
    finite log-probs.
    """
    counts: Counter[str] = Counter(empty=0, truncated=0, unscored=0, non_finite=0)
    masked = []
    for sample in samples:
        if reason := _reason_to_mask(sample, truncated=truncated):
            counts[reason] += 1
            sample = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
        masked.append(sample)
    if counts["non_finite"] and not any(sample.loss_mask.any() for sample in masked):
        raise RunError(
            f"step {step + 1}: no response has finite log-probs under the training engine, so its weights are broken; "
            "look at grad_norm before, lower optimizer.lr, and resume from an earlier checkpoint"
        )
    return masked, {f"masked/{name}": float(count) for name, count in counts.items()}


def _reason_to_mask(sample: Sample, *, truncated: bool) -> str:
    if not sample.loss_mask.any():
        return "empty"
    if sample.finish_reason == "abort" or (truncated and sample.finish_reason == "length"):
        return "truncated"
    if not math.isfinite(sample.reward):
        return "unscored"
    values = (sample.old_log_probs, sample.ref_log_probs)
    finite = all(value is None or bool(np.isfinite(value[sample.loss_mask]).all()) for value in values)
    return "" if finite else "non_finite"
