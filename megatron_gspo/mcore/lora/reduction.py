"""Sum the gradients of experts' adapters that several ranks hold, each a part of them: Megatron has
no mark for that.

The matrices that expert-tensor parallelism does not cut are on all of its ranks, each of which has
the gradient through its own part of the other matrix. Adapters that the experts share are on all
expert-parallel ranks, whose experts have other tokens. Every other adapter is reduced by Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


def finalize_gradients(model: Sequence[MegatronModule], *args: object, **kwargs: object) -> None:
    """Megatron's ``finalize_model_grads``, then one all-reduce for each group that holds replicas.

    After the data-parallel reduction, as Megatron's own sums over tensor-parallel ranks: with the
    distributed optimizer a rank's part of the gradient is complete, and the ranks of these groups
    have the same part.
    """
    finalize_model_grads(model, *args, **kwargs)
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for chunk in model:
        for parameter in chunk.parameters():
            group = getattr(parameter, "summed_over", None)
            if group is not None:
                by_group.setdefault(group, []).append(parameter.main_grad)
    for group, gradients in by_group.items():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        sums = flat.split([gradient.numel() for gradient in gradients])
        shaped = [total.view_as(g) for total, g in zip(sums, gradients, strict=True)]
        torch._foreach_copy_(gradients, shaped)
