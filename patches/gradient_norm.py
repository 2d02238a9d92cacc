"""Compute the gradient norm without a host synchronisation for each parameter.

Upstream: megatron-core 0.16.1 to 0.19.2, ``megatron/core/utils.py``,
``local_multi_tensor_l2_norm``: the replacement for Apex's kernel, used where neither Transformer
Engine nor Apex is installed, reads the norm of each gradient back to the host. Delete when:
upstream keeps the norms on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def apply() -> None:
    """Replace the slow norm where Megatron uses it; a no-op with Transformer Engine or Apex."""
    import megatron.core.optimizer.clip_grads as clip_grads
    from megatron.core import utils

    chosen = getattr(clip_grads, "l2_norm_impl", None)
    if chosen is None or chosen is getattr(utils, "local_multi_tensor_l2_norm", None):
        replace(clip_grads, "l2_norm_impl", lambda _: foreach_l2_norm)
