"""Collectives without autograd; group ``None`` is one process."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed both functions and warns at every call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: ProcessGroup | None) -> int:
    """Number of processes in ``group``; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in ``group``; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def gather_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Concatenate every rank's ``x`` [n, ...] along dimension 0 in the order of ranks: [n *
    size, ...].
    """
    size = group_size(group)
    if size == 1:
        return x
    gathered = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    _all_gather(gathered, x.contiguous(), group=group)
    return gathered


def scatter_summed_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum ``x`` [n * size, ...] over the ranks and return this rank's rows [n, ...]."""
    size = group_size(group)
    if size == 1:
        return x
    local_rows = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    _reduce_scatter(local_rows, x.contiguous(), group=group)
    return local_rows


def sum_in_place(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum contiguous ``x`` over the ranks in place and return it."""
    if group_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x
