"""Collectives of one rank without its peers: recorded in order, completed as if all ranks held what
it holds.

That is right for what decides shapes: counts of tokens per expert under balanced routing, and equal
flags. Two kinds of tensors are treated otherwise. What is received from one other rank is unknown
afterwards. And bytes that are summed come from one rank at a time (the trainer exchanges routes
like this), so that the others add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, ReduceOp
from torch.utils._pytree import tree_leaves

from megatron_gspo.tools.rehearse.call_sites import Frames, call_site, frames_above
from megatron_gspo.tools.rehearse.host_log import HostLog
from megatron_gspo.tools.rehearse.known_values import KnownValues
from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result
from megatron_gspo.tools.rehearse.records import Collective

_SHORT_NAMES = {
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "context_parallel": "cp",
    "data_parallel": "dp",
    "data_parallel_group_with_cp": "dp_cp",
    "expert_model_parallel": "ep",
    "expert_tensor_parallel": "expert_tp",
    "expert_tensor_and_model_parallel": "expert_tp_ep",
    "expert_data_parallel": "expert_dp",
    "model_parallel": "model",
    "default_pg": "world",
}
Rows = list[Tensor]


@dataclass
class CollectiveLog:
    """find: where findings go. values: the known values of device tensors. gpu_only: whether the
    job's backend takes tensors of the GPU alone. gloo_groups: names of groups that are for the CPU.
    groups_of_world, groups_of_rank: process groups that were made, and those of them that this rank
    is in."""

    host: HostLog
    values: KnownValues
    gpu_only: bool = True
    gloo_groups: set[str] = field(default_factory=set)
    groups_of_world: int = 0
    groups_of_rank: int = 0
    _calls: list[tuple[Collective, Frames]] = field(default_factory=list)
    _ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """In the order of calls."""
        sites: dict[Frames, tuple[str, ...]] = {}
        calls = []
        for call, frames in self._calls:
            site = sites.get(frames)
            if site is None:
                site = call_site(frames)
                sites[frames] = site
            calls.append(Collective(**{**vars(call), "where": site}))
        return tuple(calls)

    def call(self, func: Operation, args: Args, kwargs: Kwargs) -> Result:
        """Record one of torch's ``c10d`` operations and imagine its result."""
        name, inputs, outputs, given, group = self.record(func, args, kwargs)
        _EFFECTS[name](self, inputs, outputs, given, group)
        work = FakeWork().boxed()
        if len(func._schema.returns) == 1:
            return work
        return args[0], work

    def record(
        self, func: Operation, args: Args, kwargs: Kwargs
    ) -> tuple[str, Rows, Rows, Kwargs, dist.ProcessGroup]:
        """Record one of torch's ``c10d`` operations; its name, what goes in and comes out, all
        arguments by name, and the group."""
        given = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        } | kwargs
        group = ProcessGroup.unbox(given["process_group"])
        name = func._schema.name.split("::")[1].strip("_")
        if name not in _EFFECTS:
            raise NotImplementedError(
                f"the rehearsal has no rule for the collective {func._schema.name}"
            )
        sent, received = _tensors(given)
        self._check(name, sent, received, given, group)
        self._record(name, sent, received, given, group)
        return name, sent, received, given, group

    def call_with_objects(self, name: str, group: dist.ProcessGroup) -> None:
        """Record a collective of pickled objects; their size is that of the largest of any
        rank, which isn't known.
        """
        self._append(
            Collective(
                name,
                self.name_of(group),
                self.ranks_of(group),
                "object",
                0,
                (),
                self.host.phase,
                device="cpu",
            )
        )

    def name_of(self, group: dist.ProcessGroup) -> str:
        """The short name of a group's kind, such as ``tp``; ``_gloo`` at its end for one of the
        CPU.
        """
        name = str(group.group_desc or "").lower()
        is_gloo = name.endswith("_gloo")
        name = name.removesuffix("_gloo")
        short = _SHORT_NAMES.get(name) or _SHORT_NAMES.get(
            name.removesuffix("_group"), name.removesuffix("_group")
        )
        return (short or "unnamed") + ("_gloo" if is_gloo else "")

    def ranks_of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Global ranks of a group's members, in the group's order."""
        key = group.group_name
        if key not in self._ranks:
            self._ranks[key] = tuple(dist.get_process_group_ranks(group))
        return self._ranks[key]

    def _append(self, call: Collective) -> None:
        self._calls.append((call, frames_above(3)))

    def _check(
        self, name: str, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup
    ) -> None:
        tensors = [*sent, *received]
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1:
            self.host.find(
                "collective_device_mix", f"{name} on tensors of {' and '.join(sorted(devices))}"
            )
        elif (
            self.gpu_only
            and name != "barrier"
            and devices == {"cpu"}
            and group.group_name not in self.gloo_groups
        ):
            self.host.find(
                "collective_on_cpu", f"{name} of a CPU tensor in group {self.name_of(group)}"
            )
        if len({tensor.dtype for tensor in tensors}) > 1:
            self.host.find(
                "dtype_mix", f"{name} of {' and '.join(sorted({str(t.dtype) for t in tensors}))}"
            )
        fault = _shape_fault(name, sent, received, given, group.size())
        if fault:
            self.host.find(
                "collective_shape",
                f"{name} in group {self.name_of(group)} of {group.size()}: {fault}",
            )

    def _record(
        self, name: str, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup
    ) -> None:
        tensors = [*sent, *received]
        peer = given.get("dst", given.get("src"))
        parts = [given.get("input_split_sizes") or (), given.get("output_split_sizes") or ()]
        widths = [
            _row_bytes(rows[0]) if part else 0
            for part, rows in zip(parts, (sent, received), strict=True)
        ]
        self._append(
            Collective(
                op=name,
                group=self.name_of(group),
                ranks=self.ranks_of(group),
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                bytes=0 if name == "barrier" else max(_bytes(sent), _bytes(received)),
                where=(),
                phase=self.host.phase,
                device=tensors[0].device.type if tensors else "cpu",
                reduction=_reduction(given),
                peer=None if peer is None else self.ranks_of(group)[peer],
                sent=tuple(rows * widths[0] for rows in parts[0]),
                received=tuple(rows * widths[1] for rows in parts[1]),
            )
        )

    # What each collective does to known values

    def _reduce_all(
        self, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup
    ) -> None:
        for tensor in sent:
            value = self.values.get(tensor)
            if value is not None and _reduction(given) == "sum" and tensor.dtype is not torch.uint8:
                value.mul_(group.size())

    def _keep(self, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup) -> None:
        pass

    def _forget(self, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup) -> None:
        for tensor in received:
            self.values.forget(tensor)

    def _gather(self, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup) -> None:
        copies = len(received) // len(sent)
        for i, out in enumerate(received):
            source = sent[i // copies]
            value = self.values.get(source)
            if value is not None and out.numel() != source.numel():
                value = value.reshape(-1).repeat(out.numel() // max(source.numel(), 1))
            self.values.put(out, value)

    def _scatter_sum(
        self, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup
    ) -> None:
        for out, source in zip(received, sent, strict=False):
            value = self.values.get(source)
            factor = group.size() if _reduction(given) == "sum" else 1
            self.values.put(
                out,
                None if value is None else value.reshape(group.size(), -1)[group.rank()] * factor,
            )

    def _exchange(
        self, sent: Rows, received: Rows, given: Kwargs, group: dist.ProcessGroup
    ) -> None:
        for out, source in zip(received, sent, strict=True):
            value = self.values.get(source)
            is_even = not (given.get("input_split_sizes") or given.get("output_split_sizes"))
            # Every rank sends me what I send to my own place.
            if value is not None and is_even and value.numel():
                own = value.reshape(group.size(), -1)[group.rank()]
                self.values.put(out, own.repeat(group.size()))
            elif value is not None and not self.values.is_on_device(out) and value.numel():
                self.values.put(
                    out, value.reshape(-1).repeat(-(-out.numel() // value.numel()))[: out.numel()]
                )
            else:
                self.values.forget(out)


_Effect = Callable[[CollectiveLog, Rows, Rows, Kwargs, dist.ProcessGroup], None]
_EFFECTS: dict[str, _Effect] = {
    "allreduce": CollectiveLog._reduce_all,
    "allreduce_coalesced": CollectiveLog._reduce_all,
    "reduce": CollectiveLog._keep,
    "broadcast": CollectiveLog._keep,
    "allgather": CollectiveLog._gather,
    "allgather_base": CollectiveLog._gather,
    "allgather_into_tensor_coalesced": CollectiveLog._gather,
    "reduce_scatter": CollectiveLog._forget,
    "reduce_scatter_base": CollectiveLog._scatter_sum,
    "reduce_scatter_tensor_coalesced": CollectiveLog._scatter_sum,
    "alltoall": CollectiveLog._forget,
    "alltoall_base": CollectiveLog._exchange,
    "gather": CollectiveLog._forget,
    "scatter": CollectiveLog._forget,
    "send": CollectiveLog._keep,
    "recv": CollectiveLog._forget,
    "barrier": CollectiveLog._keep,
}
_INPUTS = ("input_tensors", "input_tensor", "inputs", "input")
_OUTPUTS = ("output_tensors", "output_tensor", "outputs", "output")


def _tensors(given: Kwargs) -> tuple[Rows, Rows]:
    """What goes in and what comes out; an operation in place has one list, which is both."""
    both = given.get("tensors", given.get("tensor"))
    if both is not None:
        rows = tree_leaves(both)
        return rows, rows
    sent: Any = next((given[name] for name in _INPUTS if name in given), [])
    received: Any = next((given[name] for name in _OUTPUTS if name in given), [])
    return tree_leaves(sent), tree_leaves(received)


def _shape_fault(name: str, sent: Rows, received: Rows, given: Kwargs, size: int) -> str:
    """Why the sizes don't fit a group of ``size``, or nothing."""
    inside = sum(t.numel() for t in sent)
    outside = sum(t.numel() for t in received)
    if name.startswith("allgather") and outside != inside * size and name != "allgather":
        return f"{outside} elements for {inside} of each rank"
    if name.startswith("reduce_scatter") and inside != outside * size and name != "reduce_scatter":
        return f"{inside} elements give {outside} to each rank"
    if name == "alltoall_base":
        for what, tensor in (("input", sent[0]), ("output", received[0])):
            parts = given.get(f"{what}_split_sizes") or ()
            if parts and (sum(parts) != tensor.shape[0] or len(parts) != size):
                return f"the {what} parts {list(parts)} do not divide {tensor.shape[0]} rows"
    return ""


def _reduction(given: Kwargs) -> str:
    op: Any = given.get("reduce_op")
    if op is None:
        return ""
    kind = op.op() if hasattr(op, "op") else op
    return next(
        (
            name.lower()
            for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
            if kind == getattr(ReduceOp, name)
        ),
        "other",
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()
