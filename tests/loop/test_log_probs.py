"""What the passes for log-probs need of the samples. Whole passes: tests/equivalence, tests/train."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.config import ConfigError, RolloutConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.log_probs import check_supports
from tests.support.samples import make_sample


def test_an_engine_that_returns_no_support_is_refused():
    rollout = RolloutConfig(rollout_batch_size=1, top_k=3, max_support=3)
    sample = make_sample(2, 2)
    with pytest.raises(ConfigError, match="rollout.max_support = 3: the engine does not return"):
        check_supports(TrainingBatch.of([sample]), rollout)
    sample.support_lengths = np.array([1, 1], dtype=np.int32)
    sample.support_ids = sample.response_ids.astype(np.int32)
    check_supports(TrainingBatch.of([sample]), rollout)
    with pytest.raises(ValueError, match="support_ids is missing from 1 of 2 samples"):
        TrainingBatch.of([sample, make_sample(1, 2)])
