"""How well values predict returns; the value model's steps are in `tests/mcore/test_value_steps.py`
and whole runs in `tests/train/test_ppo.py`."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.critic import explained_variance
from tests.support.samples import make_sample


def sample(values: list[float], returns: list[float], **fields: object) -> Sample:
    given = dict(
        values=np.array(values, dtype=np.float32),
        returns=np.array(returns, dtype=np.float32),
        reward=1.0,
    )
    return make_sample(1, len(values), **{**given, **fields})


def measured(*samples: Sample) -> dict[str, float]:
    return explained_variance(TrainingBatch.of(list(samples)))


def test_explained_variance_by_hand():
    """Returns 0, 2, 4 with variance 8/3; errors 0, 1, -1 with variance 2/3."""
    metrics = measured(sample([0.0, 1.0], [0.0, 2.0]), sample([5.0], [4.0]))
    assert metrics == pytest.approx({"critic/return": 2.0, "critic/explained_variance": 0.75})


def test_its_ends():
    assert measured(sample([0.0, 2.0], [0.0, 2.0]))["critic/explained_variance"] == 1
    assert measured(sample([1.0, 1.0], [0.0, 2.0]))["critic/explained_variance"] == 0
    assert measured(sample([2.0, 0.0], [0.0, 2.0]))["critic/explained_variance"] < 0
    # Equal returns.
    assert measured(sample([0.1, 0.2], [0.7, 0.7])) == {"critic/return": pytest.approx(0.7)}


def test_what_does_not_count():
    counted = sample([0.0, 2.0, 9.0], [0.0, 2.0, 5.0], mask=[True, True, False])
    unknown = sample([3.0], [8.0], reward=float("nan"))
    assert measured(counted, unknown) == {"critic/return": 1.0, "critic/explained_variance": 1.0}
    assert measured(unknown) == {}
