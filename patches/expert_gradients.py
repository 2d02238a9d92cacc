"""Reduce and measure expert gradients over the right groups where expert-tensor differs from tensor
parallelism.

Upstream: megatron-core 0.16.1 to 0.18.2; 0.19.0 corrects both (NVIDIA/Megatron-LM#5916), by the
conditions used here.

1. ``tensor_parallel/layers.py`` marks expert weights for the expert-data-parallel group only if the
   expert-parallel size is above 1. With TP > 1, EP = 1 and expert-TP = 1 each tensor-parallel rank
   feeds its own tokens to a replica of every expert, but the gradients of these replicas are never
   added up: silently wrong by the other ranks' part.
2. ``optimizer/clip_grads.py`` counts a parameter that isn't marked as split by tensor parallelism
   on the first tensor-parallel rank only. Transformer Engine's grouped experts carry no such mark
   under expert-TP = 1, although with EP > 1 the other ranks hold other experts: the gradient norm
   is too small and clipping too weak.

3. All versions: the bias of an expert's ``linear_fc2`` is marked as sequence-parallel, for which
   its gradient is summed over the tensor-parallel ranks, whose experts are others, or have summed
   it already. Under expert-TP all ranks hold it, and each counts it in the gradient norm.

Delete when (3 stays): the oldest supported megatron-core is 0.19.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_gspo.patches.mark import replace


def apply() -> None:
    """Let Megatron's DistributedDataParallel mark the experts' parameters before it reads the
    marks.
    """
    from megatron.core.distributed import DistributedDataParallel

    replace(DistributedDataParallel, "__init__", _marking)


def _marking(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(
        self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        mark_experts(module, config)
        original(self, config, ddp_config, module, *args, **kwargs)

    return __init__


def mark_experts(model: Any, config: Any) -> int:
    """Mark the experts' parameters of one model chunk.

    ``model`` is a Megatron ``GPTModel``; ``config`` its ``TransformerConfig``. Returns how many
    parameters changed. Calling it again changes nothing.
    """
    if config.num_moe_experts is None:
        return 0
    own_groups = config.expert_model_parallel_size > 1 or (
        config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    changed = 0
    for module in model.modules():
        if config.add_bias_linear and hasattr(module, "local_experts"):
            changed += _mark_biases(module)
    for name, parameter in model.named_parameters():
        # Adapters have marks of their own.
        if not own_groups or ".experts." not in name or ".lora." in name:
            continue
        whole = config.expert_tensor_parallel_size == 1 and not getattr(
            parameter, "tensor_model_parallel", False
        )
        if getattr(parameter, "allreduce", True) or whole:
            parameter.allreduce = False
            changed += 1
        if whole:
            # Every rank's experts count: none is a copy within its own group.
            parameter.tensor_model_parallel = True
    return changed


def _mark_biases(experts: Any) -> int:
    """Mark the biases of ``linear_fc2``; one of the expert-tensor ranks, which all hold them,
    counts in the norm.
    """
    is_first = experts.tp_group.rank() == 0
    for expert in experts.local_experts:
        bias = expert.linear_fc2.bias
        bias.sequence_parallel = False
        bias.tensor_model_parallel = is_first
        bias.shared = not is_first
    return len(experts.local_experts)
