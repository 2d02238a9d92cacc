"""The bias by which routers choose experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2): a buffer
in float32.

It belongs to the weights: it is loaded, stored and sent with them, and rounding it changes routes.
No optimizer trains it; where an update rate is set, Megatron moves it after each mini-batch by the
experts' load.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def set_up_expert_bias(chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
    """Keep the bias of all routers in float32; with an update rate of 0 let nothing move it.

    ``config``: of all chunks of this rank, which are built.
    """
    frozen = not config.moe_router_bias_update_rate
    for chunk in chunks:
        routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        for router in routers:
            if router.expert_bias is not None:
                router.expert_bias.data = router.expert_bias.data.float()
                router.local_tokens_per_expert.data = router.local_tokens_per_expert.data.float()
                router._apply_expert_bias = (
                    _count_nothing if frozen else functools.partial(_count_load, router)
                )
    if frozen:
        config.moe_router_enable_expert_bias = (
            False  # whether it moves when gradients are finalized
        )


def _count_nothing(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """In place of Megatron's count of a frozen bias's load."""


def _count_load(
    router: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None
) -> None:
    """Megatron's count of each expert's tokens, ``routing_map`` [t, E], in passes with a gradient.
    Megatron's own is compiled at its first call, which takes a C++ compiler on a CPU."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            router.local_tokens_per_expert += routing_map.sum(0)
