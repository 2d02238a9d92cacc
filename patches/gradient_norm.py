"""Compute the gradient norm without a host synchronisation for each parameter, and clip in place.

Upstream: megatron-core 0.16.1 to 0.19.2, ``megatron/core/utils.py``: the replacements for Apex's
kernels, used where neither Transformer Engine nor Apex is installed.
``local_multi_tensor_l2_norm`` reads the norm of each gradient back to the host.
``local_multi_tensor_scale`` writes each scaled gradient to a new tensor, and copies it back. Delete
when: upstream keeps the norms on the device and scales in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.patches.mark import replace


def foreach_l2_norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor: bool,
    *args: Any,
) -> tuple[Tensor, None]:
    """The norm of all tensors together, float32 [1] on their device; arguments as of Apex's
    multi_tensor_l2norm.
    """
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(list(norms))).view(1), None


def foreach_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    """Write the tensors of the first list times ``scale`` to those of the second, which clipping
    calls with one list twice; arguments as of Apex's multi_tensor_scale.
    """
    sources, results = tensor_lists
    for source, result in zip(sources, results, strict=True):
        if source is not result:
            result.copy_(source)
    if results:
        torch._foreach_mul_(list(results), scale)


def _returning(ours: Callable[..., Any]) -> Callable[[object], Callable[..., Any]]:
    """A choice by the tensors, which is always ours."""
    return lambda _: ours


def apply() -> None:
    """Replace the slow functions where Megatron uses them; a no-op with Transformer Engine or
    Apex.
    """
    import megatron.core.optimizer.clip_grads as clip_grads
    from megatron.core import utils

    for name, upstream, ours in (
        ("l2_norm_impl", "local_multi_tensor_l2_norm", foreach_l2_norm),
        ("multi_tensor_scale_impl", "local_multi_tensor_scale", foreach_scale),
    ):
        chosen = getattr(clip_grads, name, None)
        if chosen is None or chosen is getattr(utils, upstream, None):
            replace(clip_grads, name, _returning(ours))
