"""What each figure of a plan rests on: a formula that agrees with rehearsals, or an estimate."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.host_costs import HostCosts
from megatron_gspo.tools.plan.memory import RECOMPUTE, Memory
from megatron_gspo.tools.plan.step_time import StepTime
from megatron_gspo.tools.plan.workload import Workload

REHEARSED, ESTIMATED = "rehearsed", "estimated"
# model types of which `tests.tools.plan.agreement` compares rehearsals
_COMPARED = ("qwen3_moe", "qwen3_next", "minimax_m2", "glm4_moe", "gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text")
EXPLAINED = (
    f"{REHEARSED}: the formula agrees with rehearsals of Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Next-80B-A3B, "
    f"Qwen3.5-35B-A3B, GLM-4.5-Air, MiniMax-M2 and gpt-oss-20b; the assumptions expert_imbalance and fragmentation "
    f"come on top. {ESTIMATED}: no rehearsal has this figure."
)
_MIXERS = {"attention", "gated_delta_net", "joint_norm_attention", "sink_attention"}
_COLLECTIVES = ("tensor", "context", "expert", "expert tensor", "pipeline", "gradients", "weights", "expert gradients",
                "expert weights")  # fmt: skip


def basis_of(shape: ModelShape, work: Workload) -> dict[str, Any]:
    """`REHEARSED` or `ESTIMATED` for each figure, under its keys in ``Plan.to_json``.

    Rehearsals have torch layers in bfloat16, most of them with experts, and no windows but gpt-oss's. Transformer
    Engine exchanges as many bytes, except over context-parallel ranks.
    """
    torch_layers = work.implementation == "torch"
    compared = shape.model_type in _COMPARED and set(shape.mixers) <= _MIXERS and any(shape.moe_layers)
    same_layers = compared and torch_layers and work.dtype_bytes == 2
    activations = REHEARSED if same_layers else ESTIMATED
    states = dict.fromkeys(("weights", "gradients", "optimizer", "reference"), REHEARSED)
    memory = {field.name: ESTIMATED for field in fields(Memory) if field.name != "stage"} | {"total": ESTIMATED}
    return {
        "memory_bytes": memory | states | {"activations": activations, "head": activations},
        "activations_bytes": dict.fromkeys(RECOMPUTE, activations),
        "collective_bytes": dict.fromkeys(_COLLECTIVES, REHEARSED)
        | {"context": REHEARSED if torch_layers else ESTIMATED},
        "seconds": {field.name: ESTIMATED for field in fields(StepTime)} | {"total": ESTIMATED},
        "host": {field.name: ESTIMATED for field in fields(HostCosts)},
        **dict.fromkeys(("utilisation", "engine_concurrency", "limits"), ESTIMATED),
    }
