"""Let the MoE dispatchers exchange parts of unequal size on a CPU.

Upstream: megatron-core 0.16.1 to 0.19.2, ``tensor_parallel/mappings.py``. On a CPU the token
dispatcher keeps its split sizes as tensors, which ``all_to_all_single`` refuses; and expert-tensor
parallelism calls ``all_gather`` and ``reduce_scatter`` with parts of unequal size, which NCCL takes
and gloo refuses. Delete when: the dispatcher converts the sizes itself and gloo takes unequal
parts.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_gspo.patches import megatron_on_cpu
from megatron_gspo.patches.mark import replace


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _with_lists(original: Any) -> Any:
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **rest: Any,
    ) -> Any:
        return original(
            output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **rest
        )

    return all_to_all_single


def _uneven(parts: Any, group: Any, async_op: bool) -> bool:
    """Whether this call is one that gloo would refuse: the sizes are the same on every rank, so
    all ranks agree.
    """
    return (
        not async_op
        and dist.get_backend(group) == "gloo"
        and len({tuple(part.shape) for part in parts}) > 1
    )


def _gather_uneven(original: Any) -> Any:
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if not _uneven(tensor_list, group, async_op):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    return all_gather


def _reduce_scatter_uneven(original: Any) -> Any:
    def reduce_scatter(
        output: Any,
        input_list: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _uneven(input_list, group, async_op):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            part = part.clone()
            dist.reduce(part, op=op, group=group, group_dst=rank)
            if rank == dist.get_rank(group):
                output.copy_(part)
        return None

    return reduce_scatter


def apply() -> None:
    """Replace the three collectives by ones that convert or split their parts; only where
    Megatron runs on a CPU.
    """
    if not megatron_on_cpu.is_applied():
        return
    replace(dist, "all_to_all_single", _with_lists)
    replace(dist, "all_gather", _gather_uneven)
    replace(dist, "reduce_scatter", _reduce_scatter_uneven)
