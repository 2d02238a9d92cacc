"""Reduce and measure expert gradients over the right groups where expert-tensor differs from tensor parallelism.

Upstream: megatron-core 0.16.1 to 0.18.2; 0.19.0 corrects both (NVIDIA/Megatron-LM#5916), by the conditions used here.

1. ``tensor_parallel/layers.py`` marks expert weights for the expert-data-parallel group only if the expert-parallel
   size is above 1. With TP > 1, EP = 1 and expert-TP = 1 each tensor-parallel rank feeds its own tokens to a replica of
   every expert, but the gradients of these replicas are never added up: silently wrong by the other ranks' part.
2. ``optimizer/clip_grads.py`` counts a parameter that isn't marked as split by tensor parallelism on the first
   tensor-parallel rank only. Transformer Engine's grouped experts carry no such mark under expert-TP = 1, although with
   EP > 1 the other ranks hold other experts: the gradient norm is too small and clipping too weak.

Delete when: the oldest supported megatron-core is 0.19.
"""

from __future__ import annotations

from typing import Any


def apply(model: Any, config: Any) -> int:
    """Mark the experts' parameters of one model chunk, before Megatron's DistributedDataParallel reads the marks.

    ``model`` is a Megatron ``GPTModel``; ``config`` its ``TransformerConfig``. Returns how many parameters changed.
    """
    if config.num_moe_experts is None:
        return 0
    own_groups = config.expert_model_parallel_size > 1 or (
        config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    changed = 0
    for name, parameter in model.named_parameters():
        if ".experts." not in name or not own_groups:
            continue
        whole = config.expert_tensor_parallel_size == 1 and not getattr(parameter, "tensor_model_parallel", False)
        if getattr(parameter, "allreduce", True) or whole:
            parameter.allreduce = False
            changed += 1
        if whole:
            parameter.tensor_model_parallel = True  # every rank's experts count: none is a copy within its own group
    return changed
