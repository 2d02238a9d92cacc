"""How many weight versions behind the trainer the tokens of a batch were sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_gspo.data.sample import Sample


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """``staleness/*`` of the trained tokens of a rollout batch, in weight versions: rollout steps of the loop.

    version: of the weights before the batch's first update, which is the number of steps done. 0 is on-policy.
    Nothing where no sample has ``token_versions``, that is where the engine can only sample on-policy.
    """
    if all(sample.token_versions is None for sample in samples):
        return {}
    behind = version - np.concatenate([sample.trained_versions for sample in samples])
    if not behind.size:
        return {}
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}
