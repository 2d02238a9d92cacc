"""Metrics of a rollout batch, by hand."""

import numpy as np

from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.sample_batch import rows_of
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.sample_metrics import source_metrics, staleness, turn_metrics
from tests.loop.episodes import episode
from tests.support.samples import make_prompt, make_sample


def versions(*values):
    return np.array(values, dtype=np.int32)


def test_staleness_by_hand():
    partial = make_sample(
        2, 4, mask=[1, 1, 0, 1], weight_version=3, token_versions=versions(3, 5, 3, 6)
    )
    # No versions of its own: both tokens are of version 5.
    whole = make_sample(1, 2, weight_version=5)
    assert staleness(TrainingBatch.of([partial, whole]), 6) == {
        "staleness/mean": (3 + 1 + 0 + 1 + 1) / 5,
        "staleness/max": 3.0,
    }


def test_masked_tokens_do_not_count():
    masked = make_sample(2, 2, mask=[0, 0], weight_version=0, token_versions=versions(0, 0))
    fresh = make_sample(1, 2, weight_version=8, token_versions=versions(8, 8))
    assert staleness(TrainingBatch.of([masked, fresh]), 8) == {
        "staleness/mean": 0.0,
        "staleness/max": 0.0,
    }
    assert staleness(TrainingBatch.of([masked]), 8) == {}


def test_an_engine_without_versions_is_told_nothing():
    assert (
        staleness(TrainingBatch.of([make_sample(1, 2), make_sample(1, 2, weight_version=4)]), 9)
        == {}
    )


def test_turn_metrics_by_hand():
    assert turn_metrics(rows_of([make_sample(1, 3)])) == {}
    metrics = turn_metrics(rows_of([episode(1.0), episode(1.0, 2.0), episode(0.0, 0.0, 1.0)]))
    assert metrics == {"turns/mean": 2.0, "turns/max": 3.0, "turns/observation_tokens": 1.0}


def test_metrics_of_sources_by_hand():
    prompts = MixedPrompts(
        {"a": [make_prompt(0), make_prompt(1)], "b": [make_prompt(0)], "c": [make_prompt(0)]}
    )
    table = rows_of(
        [
            make_sample(1, length, seed=0, prompt_index=prompt, sample_index=number, reward=reward)
            for prompt, number, length, reward in (
                (0, 0, 2, 1.0),
                (0, 1, 4, 0.0),
                (1, 0, 3, 1.0),
                (1, 1, 3, 1.0),
                (2, 0, 7, float("nan")),
                (2, 1, 9, 0.5),
            )
        ]
    )
    assert source_metrics(table, prompts) == {
        "sources/a/prompts": 2.0,
        "sources/a/reward": 0.75,
        "sources/a/response_length": 3.0,
        "sources/a/zero_variance": 0.5,
        "sources/b/prompts": 1.0,
        "sources/b/reward": 0.5,
        "sources/b/response_length": 8.0,
        "sources/b/zero_variance": 1.0,
        "sources/c/prompts": 0.0,
    }
    assert source_metrics(table, [make_prompt(i) for i in range(4)]) == {}
