"""Which log-probs the samples get; the passes themselves are stubs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop import log_probs
from megatron_gspo.loop.log_probs import with_log_probs
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.timers import Timers
from tests.support.samples import make_sample
from tests.support.training_runs import base_config

SAMPLES = [make_sample(1, 3, seed=i, mask=[True, True, False]) for i in range(2)]


def scored(monkeypatch, samples=SAMPLES, *, reference=None, has_ratio=True, **algorithm: Any):
    """(samples, metrics, policies that made a pass); the log-probs of policy p are all -p."""
    passes = []

    def compute(policy, batch, *args, **options):
        assert options["plan"] == "the whole batch"
        passes.append(policy)
        values = {i: np.full(s.response_length, -policy, np.float32) for i, s in batch.held.items()}
        entropy = {i: np.full(3, 2.0, np.float32) for i in batch.held}
        return SimpleNamespace(log_probs=values, entropy=entropy, routing=None)

    monkeypatch.setattr(log_probs, "compute_log_probs", compute)
    config = Config.from_dict(base_config("model", "run", algorithm=algorithm))
    routing = RoutingReplay(config.routing, None, has_ratio)
    plan: Any = SimpleNamespace(whole="the whole batch")
    batch, metrics = with_log_probs(SampleBatch.of(samples), (1, reference), config, plan, routing, Timers())
    return batch.samples, metrics, passes


def test_recomputed_by_the_policy(monkeypatch):
    before = SAMPLES[0].old_log_probs.copy()
    found, metrics, passes = scored(monkeypatch)
    assert passes == [1] and [s.old_log_probs.tolist() for s in found] == [[-1.0] * 3] * 2
    assert metrics["entropy"] == 2.0 and "mismatch/abs_diff" in metrics
    assert np.array_equal(SAMPLES[0].old_log_probs, before), "the given samples do not change"


def test_the_references_too(monkeypatch):
    found, _, passes = scored(monkeypatch, reference=5, kl_loss_coef=0.1)
    assert passes == [1, 5] and found[0].ref_log_probs.tolist() == [-5.0] * 3


def test_the_rollouts_own(monkeypatch):
    found, metrics, passes = scored(monkeypatch, old_log_probs="rollout")
    assert passes == [] and metrics == {} and found[1].old_log_probs is SAMPLES[1].rollout_log_probs
    with pytest.raises(ConfigError, match="the engine gives no log-probs; set it to recompute"):
        scored(monkeypatch, [make_sample(1, 2, log_probs=False)], old_log_probs="rollout")


def test_nothing_without_a_ratio_and_a_reference(monkeypatch):
    found, metrics, passes = scored(monkeypatch, has_ratio=False)
    assert passes == [] and metrics == {} and found == SAMPLES


def test_the_entropy_is_that_of_trained_tokens():
    values = {0: np.array([1.0, 3.0, 100.0]), 1: np.array([5.0, 7.0, 100.0])}
    assert log_probs._mean_of_trained(values, SampleBatch.of(SAMPLES)) == 4.0
    assert np.isnan(log_probs._mean_of_trained(values, SampleBatch.of([make_sample(1, 3, mask=[False] * 3)])))
