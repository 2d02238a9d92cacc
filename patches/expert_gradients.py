"""Reduce expert gradients over the right group when expert-tensor parallelism differs from tensor parallelism.

Upstream: megatron-core 0.16.1, ``tensor_parallel/layers.py``: expert weights are marked for the expert-data-parallel
group only if the expert-parallel size is above 1. With TP > 1, EP = 1 and expert-TP = 1 each tensor-parallel rank
feeds its own tokens to a replica of every expert, but the gradients of these replicas are never added up: silently
wrong by the other ranks' part. Corrected upstream in 0.17 (``use_expert_pgs``), whose condition this file applies.
Delete when: the oldest supported megatron-core is 0.17.
"""

from __future__ import annotations

from typing import Any


def apply(model: Any, config: Any) -> int:
    """Mark the experts' parameters of one model chunk, before Megatron's DistributedDataParallel reads the mark.

    ``model`` is a Megatron ``GPTModel``; ``config`` its ``TransformerConfig``. Returns how many parameters changed.
    """
    if config.num_moe_experts is None:
        return 0
    own_groups = config.expert_model_parallel_size > 1 or (
        config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    changed = 0
    for name, parameter in model.named_parameters():
        if ".experts." in name and own_groups and getattr(parameter, "allreduce", True):
            parameter.allreduce = False
            changed += 1
    return changed
