"""Which known issues apply to a situation: versions, layout and model, and the patches of this
process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import megatron_gspo.mcore  # noqa: F401 (applies the patches)
from megatron_gspo.patches.issue import Situation
from megatron_gspo.patches.known_issues import KNOWN_ISSUES, applicable

CPU = Situation(megatron=(0, 16, 1))
GPU = Situation(megatron=(0, 19, 2), gpu=True, gloo=False, transformer_engine=True, has_config=True)
MOE = replace(CPU, has_experts=True, has_config=True, world_size=8)


def places(situation: Situation) -> set[str]:
    return {issue.handled_by.replace("`", "") for issue in applicable(situation)}


@pytest.mark.parametrize(
    "change, handled_by",
    [
        (dict(tensor=2), "expert_gradients.py (1)"),
        (dict(tensor=2, expert=2, transformer_engine=True), "expert_gradients.py (2)"),
        (
            dict(virtual_pipeline=2, pipeline=2),
            "mcore/model.py: overlap_p2p_comm on, batch_p2p_comm off under interleaving",
        ),
        (
            dict(pipeline=2),
            "mcore/model.py: deallocate_pipeline_outputs off under interleaving and on gloo",
        ),
        (dict(tensor=2), "mcore/norms.py: RMSNorm"),
        (dict(replay=True), "mcore/routing_replay/router_hooks.py: RouterHook, refuse_bypasses"),
        (dict(world_size=8), "moe_uneven_collectives.py"),
        (dict(starts_servers=True), "servers/server_launch.py: server_environment"),
    ],
)
def test_a_layout_is_affected_and_a_single_process_is_not(change, handled_by):
    assert handled_by in places(replace(MOE, **change))
    assert handled_by not in places(replace(MOE, world_size=1))


def test_versions_limit_an_issue():
    broken = replace(MOE, tensor=2)
    assert "expert_gradients.py (1)" in places(replace(broken, megatron=(0, 18, 2)))
    assert "expert_gradients.py (1)" not in places(replace(broken, megatron=(0, 19, 0)))
    assert "te_general_gemm.py" not in places(replace(CPU, megatron=(0, 17, 0)))
    interleaved = replace(GPU, pipeline=2, virtual_pipeline=2)
    freed = "mcore/model.py: deallocate_pipeline_outputs off under interleaving and on gloo"
    assert freed in places(replace(interleaved, megatron=(0, 17, 1)))
    assert freed not in places(interleaved)
    assert freed in places(replace(interleaved, gloo=True))
    servers = replace(CPU, starts_servers=True, servers_on_cpu=True)
    overlap = "rollout/sglang/sglang_launch.py: --disable-overlap-schedule"
    assert overlap in places(replace(servers, sglang=(0, 5, 15)))
    assert overlap not in places(replace(servers, sglang=(0, 5, 23)))
    assert "sglang_on_cpu/sitecustomize.py (1)" in places(replace(servers, sglang=(0, 5, 23)))
    worker = "rollout/vllm/worker_extension/megatron_gspo_worker.py"
    assert f"{worker}: undo_dropped_draws" in places(replace(servers, vllm=(0, 32, 0)))
    assert f"{worker}: undo_dropped_draws" not in places(replace(servers, sglang=(0, 5, 23)))


def test_a_gpu_with_transformer_engine_has_no_issue_of_cpus():
    assert places(GPU) == set()


def test_every_issue_applies_somewhere():
    wide = replace(
        MOE,
        tensor=2,
        pipeline=2,
        virtual_pipeline=2,
        expert=2,
        replay=True,
        starts_servers=True,
        servers_on_cpu=True,
        sglang=(0, 5, 23),
        vllm=(0, 33, 0),
    )
    situations = [
        wide,
        replace(wide, expert=1),
        replace(wide, transformer_engine=True),
        replace(wide, sglang=(0, 5, 15)),
        replace(wide, megatron=(0, 19, 2)),
    ]
    applied = {issue.handled_by for situation in situations for issue in applicable(situation)}
    assert applied == {issue.handled_by for issue in KNOWN_ISSUES if issue.is_issue}


def test_the_patches_are_in_place_in_this_process():
    situation = replace(MOE, tensor=2, pipeline=2)
    assert {
        issue.handled_by: issue.unpatched() for issue in applicable(situation) if issue.unpatched()
    } == {}
