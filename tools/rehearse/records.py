"""What one rank's rehearsal recorded: plain data.

Sizes are in bytes, times in seconds. Call sites are tuples of ``file:line function``, innermost
first, of the project's and Megatron's code.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

CallSite = tuple[str, ...]

PHASES = (
    "build",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "critic",
    "forward_backward",
    "optimizer",
    "weight_export",
    "checkpoint_plan",
)
"""The phases of a rehearsal, in order. A rank without a reference policy skips ``ref_log_probs``,
one without a value model ``values`` and ``critic``, the value model's forward and backward pass
with its optimizer step."""

KINDS = ("weights", "gradients", "optimizer", "buffers", "inputs", "activations")
"""Kinds of device memory. ``optimizer`` includes the float32 main weights, ``buffers`` the modules'
and communication buffers, ``inputs`` the micro-batches, ``activations`` all that a step allocates
otherwise."""

FINDINGS = {
    "device_mix": "tensors of the CPU and of the GPU meet in one operation",
    "dtype_mix": "two dtypes meet in one matrix product",
    "collective_on_cpu": "a CPU tensor in a collective of the GPUs, which NCCL refuses",
    "collective_device_mix": "tensors of two devices in one collective",
    "collective_shape": "the sizes of a collective's tensors do not fit its group",
    "slow_attention": "attention that no fused kernel takes",
    "made_up_value": "a value that only a real GPU computes, replaced by a neutral one",
}
"""Kinds of `Finding`. All but ``made_up_value`` are defects."""


@dataclass(frozen=True)
class Collective:
    """One collective or point-to-point operation, in the order of calls.

    op: torch's name without underscores at the ends, such as ``allreduce``, ``allgather_base``,
    ``alltoall_base``, ``send``, ``recv``. group: such as ``tp``, ``ep``, ``expert_dp``, ``dp_cp``;
    ``ranks``: its global ranks, in the group's order. bytes: the larger of what the rank puts in
    and gets out. peer: global rank of the other side of a send or receive. sent, received: bytes to
    and from each rank of an all-to-all with uneven parts. reduction: such as ``sum``, where there
    is one.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    dtype: str
    bytes: int
    where: CallSite
    phase: str
    device: str = "cuda"
    reduction: str = ""
    peer: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostSync:
    """A place where the host waits for the GPU: ``count`` times in the phase. kind: the
    operation.
    """

    kind: str
    where: CallSite
    phase: str
    count: int


@dataclass(frozen=True)
class HostCopy:
    """Copies from host to device from one place; ``bytes`` is their sum. blocking: the host waits
    for them, as with any unpinned source."""

    bytes: int
    pinned: bool
    blocking: bool
    where: CallSite
    phase: str
    count: int


@dataclass(frozen=True)
class Finding:
    """What is wrong or was made up, see `FINDINGS`; ``count`` times from one place in the phase."""

    kind: str
    message: str
    where: CallSite
    phase: str
    count: int = 1

    @property
    def is_defect(self) -> bool:
        return self.kind != "made_up_value"


@dataclass(frozen=True)
class MemoryPoint:
    """Device memory at one operation, ``bytes`` by kind. op: the operation that allocated last;
    index: its position among all operations of the rehearsal."""

    phase: str
    index: int
    op: str
    where: CallSite
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Allocation:
    """Device memory of one kind, operation, shape and dtype: ``count`` tensors of together
    ``bytes``.
    """

    kind: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Device memory over the rehearsal: live tensors, without the allocator's rounding and
    fragmentation.

    states: ``weights``, ``gradients`` and ``optimizer`` after the optimizer step. peak: the largest
    total. peak_activations: the largest ``activations`` of forward_backward. peaks: the largest
    total of each phase. largest: what was alive at the peak, the largest first.
    """

    states: dict[str, int]
    peak: MemoryPoint
    peak_activations: MemoryPoint
    peaks: dict[str, MemoryPoint]
    largest: tuple[Allocation, ...]


@dataclass(frozen=True)
class OpTotal:
    """``count`` equal calls of an operation from one place in the phase.

    op_class: of `op_cost.CLASSES`. where: of a backward operation, the place of its forward
    operation. tensors: dtypes and shapes of the arguments. launches, read, written, flops: of one
    call; read and written are bytes.
    """

    phase: str
    is_backward: bool
    op: str
    op_class: str
    where: str
    tensors: str
    count: int
    launches: int
    read: int
    written: int
    flops: int

    @property
    def bytes(self) -> int:
        """Bytes of one call."""
        return self.read + self.written


@dataclass(frozen=True)
class CheckpointPlan:
    """This rank's part of a checkpoint. tensors: that it writes, or parts of them; written: their
    bytes. bytes: that it reads."""

    tensors: int
    bytes: int
    written: int


@dataclass(frozen=True)
class RankRecord:
    """The rehearsal of one rank.

    coordinates: the rank's place in each dimension, such as ``{"pp": 0, "tp": 1}``, and ``groups``:
    global ranks of each named group. roles: names of what the rank plays, such as ``stage 0``;
    stands_for: the ranks it was rehearsed for, itself included. micro_batches: run, and tokens of
    each. flops: of one rank by phase and operation. ops: what started kernels; issued_ops: all
    operations on device tensors, by phase. seconds: of the rehearsal, by phase.
    host_peak_bytes: of the rehearsal's process. notes: what is extrapolated or left out.
    sent_weights: bytes that this rank sends in an export of the weights. groups_of_world,
    groups_of_rank: process groups that are made at the start, and those of them that the rank is
    in.
    """

    rank: int
    world: int
    coordinates: dict[str, int]
    groups: dict[str, tuple[int, ...]]
    phases: tuple[str, ...]
    micro_batches: tuple[int, ...]
    collectives: tuple[Collective, ...]
    host_syncs: tuple[HostSync, ...]
    host_copies: tuple[HostCopy, ...]
    findings: tuple[Finding, ...]
    memory: Memory
    checkpoint: CheckpointPlan | None
    flops: dict[str, dict[str, int]]
    seconds: dict[str, float]
    host_peak_bytes: int
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    stands_for: tuple[int, ...] = field(default=())
    sent_weights: int = 0
    groups_of_world: int = 0
    groups_of_rank: int = 0
    ops: tuple[OpTotal, ...] = ()
    issued_ops: dict[str, int] = field(default_factory=dict)


def write_record(record: RankRecord, path: Path) -> None:
    """Write a record for the process that has started this one."""
    path.write_bytes(pickle.dumps(record))


def read_record(path: Path) -> RankRecord:
    """Read what `write_record` wrote, in a folder that this program has made: no other file may be
    given, since pickle runs what is in it.
    """
    record = pickle.loads(path.read_bytes())
    assert isinstance(record, RankRecord)
    return record
