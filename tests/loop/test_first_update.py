"""The first ratios of a step are exactly 1, with a model whose results depend on the shape of its
micro-batches. `tests/equivalence` asks the same of every layout.
"""

from __future__ import annotations

import pytest

from megatron_gspo.mcore.policy import build_policy
from megatron_gspo.mcore.process_groups import initialize
from tests.equivalence.cases import make_samples
from tests.equivalence.first_update import metrics_without_a_change
from tests.support.configs import adam, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model


def metrics_of(rank: int, world_size: int, path: str) -> dict[str, dict[str, float]]:
    groups = initialize(parallel(), seed=1)
    policy = build_policy(
        model_config(path, implementation="torch"),
        parallel(),
        groups,
        optimizer=adam(1e-2),
        total_steps=4,
    )
    samples = make_samples(count=8)
    return {r: metrics_without_a_change(policy, samples, replay=r) for r in ("none", "r2")}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    path = save_tiny_model(tmp_path_factory.mktemp("model"), kind="moe")
    return run_distributed(metrics_of, 1, path)[0]


@pytest.mark.parametrize("replay", ["none", "r2"])
def test_ratios_are_exactly_1_where_no_weight_has_changed(metrics, replay):
    assert metrics[replay]["log_ratio/first_update"] == 0.0
    assert metrics[replay]["ratio_token/min"] == metrics[replay]["ratio_token/max"] == 1.0
    assert metrics[replay]["perf/micro_batches"] > 1
