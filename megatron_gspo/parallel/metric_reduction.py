"""Reduce a dict of scalar metrics over a process group with a fixed, small number of
collectives.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gspo.algorithms.reduction import Reduction, reduction_of
from megatron_gspo.parallel.collectives import group_rank, group_size
from megatron_gspo.parallel.host_exchange import broadcast_bytes, max_over_ranks


def reduce_metrics(
    metrics: Mapping[str, Tensor | float],
    group: ProcessGroup | None,
    *,
    names: Sequence[str] | None = None,
    reduction: Callable[[str], Reduction] = reduction_of,
) -> dict[str, Tensor]:
    """Sum every scalar over the ranks, or take its maximum or minimum, as ``reduction`` of its name
    says.

    The inputs are shares that add up to the whole. Returns float32 scalars with sorted keys, equal
    on every rank. A rank may lack keys (all its micro-batches were empty): it adds nothing to a sum
    and does not change an extreme. NaN on any rank gives NaN. One collective for all sums, one for
    all extremes; every rank of ``group`` must call.

    names: all names of all ranks, the same on every rank. Without it they are compared first, which
        takes one more collective and synchronises a GPU, and exchanged where they differ. Raises
        ValueError for a metric that is not in names.
    """
    device = next((x.device for x in metrics.values() if isinstance(x, Tensor)), _device_of(group))
    local = {
        name: torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(())
        for name, value in metrics.items()
    }
    unknown = sorted(local.keys() - set(local if names is None else names))
    if unknown:
        raise ValueError(f"metrics {unknown} are missing from names; add them on every rank")
    if group_size(group) == 1:
        return {name: local[name] for name in sorted(local)}
    all_names = _all_names(local, device, group) if names is None else sorted(set(names))
    kinds = {name: reduction(name) for name in all_names}
    sums = [name for name, kind in kinds.items() if kind is Reduction.SUM]
    minima = {name: kind is Reduction.MIN for name, kind in kinds.items() if name not in sums}
    reduced = _sum(sums, local, device, group) | _extremes(minima, local, device, group)
    return {name: reduced[name] for name in all_names}


def reduce_records(
    records: Sequence[Mapping[str, Tensor | float]], group: ProcessGroup | None
) -> list[dict[str, Tensor]]:
    """`reduce_metrics` of several records, as many on each rank, in the collectives of one."""
    numbered = {
        f"{number} {name}": value
        for number, record in enumerate(records)
        for name, value in record.items()
    }
    reduced: list[dict[str, Tensor]] = [{} for _ in records]
    for key, value in reduce_metrics(numbered, group, reduction=_of_numbered).items():
        number, _, name = key.partition(" ")
        reduced[int(number)][name] = value
    return reduced


def _of_numbered(key: str) -> Reduction:
    return reduction_of(key.partition(" ")[2])


def _device_of(group: ProcessGroup | None) -> torch.device:
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _all_names(
    local: Mapping[str, Tensor], device: torch.device, group: ProcessGroup | None
) -> list[str]:
    """The names of all ranks. They are usually the same, which the extremes of a digest show."""
    names = sorted(local)
    digest = int.from_bytes(hashlib.sha256(json.dumps(names).encode()).digest()[:7], "little")
    extremes = torch.stack(
        [torch.full((), value, dtype=torch.int64, device=device) for value in (digest, -digest)]
    )
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.cpu().tolist()
    return names if largest == -smallest else _joined_names(local, group)


def _joined_names(local: Mapping[str, Tensor], group: ProcessGroup | None) -> list[str]:
    """The names of all ranks: the rank with the most missing ones broadcasts them, until none is
    missing. Usually once: ranks lack names where they had no sequences."""
    names: set[str] = set()
    while True:
        missing = sorted(local.keys() - names)
        most = max_over_ranks(
            np.array([len(missing) * group_size(group) + group_rank(group)]), group
        )
        count, source = divmod(int(most[0]), group_size(group))
        if not count:
            return sorted(names)
        payload = json.dumps(missing).encode() if source == group_rank(group) else None
        names.update(json.loads(broadcast_bytes(payload, group, source).tobytes()))


def _sum(
    names: list[str], local: Mapping[str, Tensor], device: torch.device, group: ProcessGroup | None
) -> dict[str, Tensor]:
    if not names:
        return {}
    absent = torch.zeros((), device=device)
    packed = torch.stack([local.get(name, absent) for name in names])
    dist.all_reduce(packed, group=group)
    return dict(zip(names, packed.unbind(), strict=True))


def _extremes(
    is_minimum: Mapping[str, bool],
    local: Mapping[str, Tensor],
    device: torch.device,
    group: ProcessGroup | None,
) -> dict[str, Tensor]:
    """A minimum is sent as the maximum of the negative, a NaN as a flag because backends differ
    in its maximum.
    """
    if not is_minimum:
        return {}
    absent = torch.full((), -torch.inf, device=device)
    values = torch.stack(
        [
            (-local[name] if minimum else local[name]) if name in local else absent
            for name, minimum in is_minimum.items()
        ]
    )
    is_nan = values.isnan()
    packed = torch.stack([values.masked_fill(is_nan, -torch.inf), is_nan.float()])
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    values = packed[0].masked_fill(packed[1] > 0, torch.nan)
    return {
        name: -value if minimum else value
        for (name, minimum), value in zip(is_minimum.items(), values.unbind(), strict=True)
    }
