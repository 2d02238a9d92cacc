"""Reduce a dict of scalar metrics over a process group with a fixed, small number of
collectives.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

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
    unknown = sorted(metrics.keys() - set(metrics if names is None else names))
    if unknown:
        raise ValueError(f"metrics {unknown} are missing from names; add them on every rank")
    local_names = sorted(metrics)
    values = _stacked([metrics[name] for name in local_names], device)
    if group_size(group) == 1:
        return dict(zip(local_names, values.unbind(), strict=True))
    all_names = _all_names(local_names, device, group) if names is None else sorted(set(names))
    local = _Local({name: i for i, name in enumerate(local_names)}, values)
    kinds = {name: reduction(name) for name in all_names}
    sums = [name for name, kind in kinds.items() if kind is Reduction.SUM]
    minima = {name: kind is Reduction.MIN for name, kind in kinds.items() if name not in sums}
    reduced = _sum(sums, local, group) | _extremes(minima, local, group)
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


def _stacked(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """[n] float32, without gradient. Each of them as a tensor of its own would cost more than all
    that is computed."""
    if not values:
        return torch.zeros(0, device=device)
    if all(isinstance(value, Tensor) and not value.dim() for value in values):
        stacked = torch.stack([value for value in values if isinstance(value, Tensor)])
        return stacked.detach().to(device, torch.float32)
    return torch.stack(
        [torch.as_tensor(value, dtype=torch.float32, device=device).reshape(()) for value in values]
    ).detach()


def _all_names(names: list[str], device: torch.device, group: ProcessGroup | None) -> list[str]:
    """The names of all ranks, from this rank's sorted ones. They are usually the same, which the
    extremes of a digest show."""
    digest = int.from_bytes(hashlib.sha256(json.dumps(names).encode()).digest()[:7], "little")
    extremes = torch.stack(
        [torch.full((), value, dtype=torch.int64, device=device) for value in (digest, -digest)]
    )
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.cpu().tolist()
    return names if largest == -smallest else _joined_names(set(names), group)


def _joined_names(local: set[str], group: ProcessGroup | None) -> list[str]:
    """The names of all ranks: the rank with the most missing ones broadcasts them, until none is
    missing. Usually once: ranks lack names where they had no sequences."""
    names: set[str] = set()
    while True:
        missing = sorted(local - names)
        most = max_over_ranks(
            np.array([len(missing) * group_size(group) + group_rank(group)]), group
        )
        count, source = divmod(int(most[0]), group_size(group))
        if not count:
            return sorted(names)
        payload = json.dumps(missing).encode() if source == group_rank(group) else None
        names.update(json.loads(broadcast_bytes(payload, group, source).tobytes()))


class _Local(NamedTuple):
    """The metrics of this rank. places: in the values [n]."""

    places: Mapping[str, int]
    values: Tensor

    def of(self, names: Iterable[str], *, absent: float) -> Tensor:
        """The values of these metrics; `absent` where this rank has none."""
        padded = torch.nn.functional.pad(self.values, (0, 1), value=absent)
        places = [self.places.get(name, len(self.places)) for name in names]
        return padded[torch.tensor(places, device=padded.device)]


def _sum(names: list[str], local: _Local, group: ProcessGroup | None) -> dict[str, Tensor]:
    if not names:
        return {}
    packed = local.of(names, absent=0.0)
    dist.all_reduce(packed, group=group)
    return dict(zip(names, packed.unbind(), strict=True))


def _extremes(
    is_minimum: Mapping[str, bool], local: _Local, group: ProcessGroup | None
) -> dict[str, Tensor]:
    """A minimum is sent as the maximum of the negative, a NaN as a flag because backends differ
    in its maximum.
    """
    if not is_minimum:
        return {}
    minimum = torch.tensor(list(is_minimum.values()), device=local.values.device)
    largest = local.of(is_minimum, absent=-torch.inf)
    smallest = local.of(is_minimum, absent=torch.inf)
    values = torch.where(minimum, -smallest, largest)
    is_nan = values.isnan()
    packed = torch.stack([values.masked_fill(is_nan, -torch.inf), is_nan.float()])
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    values = packed[0].masked_fill(packed[1] > 0, torch.nan)
    return dict(zip(is_minimum, torch.where(minimum, -values, values).unbind(), strict=True))
