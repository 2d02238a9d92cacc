"""Pass the MoE all-to-all its split sizes as lists.

Upstream: megatron-core 0.16.1 to 0.19.2, ``tensor_parallel/mappings.py``: on a CPU the token dispatcher keeps
its split sizes as tensors, which ``torch.distributed.all_to_all_single`` refuses.
Delete when: the dispatcher converts them itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_gspo.patches import megatron_on_cpu
from megatron_gspo.patches.mark import replace


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _with_lists(original: Any) -> Any:
    def all_to_all_single(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **rest: Any) -> Any:
        return original(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **rest)

    return all_to_all_single


def apply() -> None:
    """Convert tensor split sizes to lists; only where Megatron runs on a CPU."""
    if megatron_on_cpu.is_applied():
        replace(dist, "all_to_all_single", _with_lists)
