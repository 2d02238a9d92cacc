"""Planned memory against real models' on real ranks; benchmarks/plan_memory.py has many more layouts."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.plan_memory import CASES, TARGET, Case, planned, run
from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.memory import Memory, route_bytes
from megatron_gspo.tools.plan.workload import Cluster, Workload
from tests.support.ideal_gpu import GPU, IDEAL
from tests.support.model_shapes import SMALL, shape_of

CHECKED = (
    Case("dense", tied=True, sizes=dict(do=False)),
    Case("moe", recompute="selective", dtype="bfloat16"),
    Case("dense", recompute="full", dtype="bfloat16"),
    Case("moe", 2, dict(tp=2)),
    Case("dense", 2, dict(cp=2), dtype="bfloat16"),
    Case("dense", 2, dict(pp=2), tied=True, lengths=(256,) * 4),
    Case("moe", 2, dict(ep=2, do=False), lengths=(256, 256), dtype="bfloat16"),
)


def test_planned_memory_is_the_measured() -> None:
    assert set(map(_key, CHECKED)) <= set(map(_key, CASES))
    for result in run(CHECKED):
        assert result.exact(), result.case.name
        total, activations = result.errors()
        assert abs(total) < 0.05 and abs(activations) < TARGET, (result.case.name, total, activations)
        # what is compared isn't decided by the states alone: another recompute mode's figure would be seen
        other = dataclasses.replace(result.case, recompute="full" if result.case.recompute != "full" else "none")
        assert abs(planned(other, result.measured[0])["activations"] / result.measured[0]["activations"] - 1) > TARGET


def test_a_colocated_engine_leaves_room_for_weights_only() -> None:
    memory = Memory(0, weights=1, gradients=2, optimizer=4, reference=8, activations=16, head=32, routes=64, engine=128,
                    runtime=256)  # fmt: skip
    assert memory.held == 1 + 256
    assert memory.total == 1 + 2 + 4 + 8 + 16 + 64 + 128 + 256  # the head is a part of the activations
    assert dataclasses.replace(memory, value_model=512).total == memory.total + 512


def _key(case: Case) -> str:
    return repr(case)


def test_enough_layouts_are_measured() -> None:
    assert len(CASES) >= 20
    assert {case.recompute for case in CASES} == {"none", "selective", "full"}
    assert {case.dtype for case in CASES} == {"float32", "bfloat16"}
    for key in ("tp", "pp", "vp", "cp", "ep", "etp"):
        assert any(case.sizes.get(key, 1) > 1 for case in CASES), key
    assert {case.parallel.use_distributed_optimizer for case in CASES} == {True, False}
    assert {(case.kind, case.tied) for case in CASES} == {
        (kind, tied) for kind in ("dense", "moe") for tied in (True, False)
    } | {("shared", False)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_are_layouts_that_the_config_takes(case: Case) -> None:
    from megatron_gspo.config.parallel_checks import check_divisibility, check_layout
    from tests.support.tiny_models import tiny_config

    check_layout(case.parallel, case.world)
    check_divisibility(case.parallel, tiny_config(case.kind, **case.model).to_dict())


def test_routes_of_a_stage_by_hand() -> None:
    """4 replicas of PP 2, TP 2: two sequences of 32 tokens each, 24 layers x 8 ids of a byte, and half of the rows."""
    shape, cluster = shape_of(SMALL), Cluster(GPU, 16, "none")
    work = Workload(response_length=24, prompt_length=8, rollout_batch_size=2, n_samples=4, global_batch_size=8)
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert route_bytes(shape, parallel, work, cluster, IDEAL) == 2 * 32 * 24 * 8 * 1.5
