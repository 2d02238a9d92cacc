"""One rank's data plane in a world that does not exist: its collectives are recorded, and the
script has what the other ranks would add."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gspo.data.sample_batch import ROW
from megatron_gspo.parallel.rank_zero import _Outcome as Outcome
from megatron_gspo.parallel.typed_messages import encode
from megatron_gspo.tools.rehearse.collective_log import CollectiveLog
from megatron_gspo.tools.rehearse.fake_world import fake_world
from megatron_gspo.tools.rehearse.host_log import HostLog
from megatron_gspo.tools.rehearse.known_values import KnownValues
from megatron_gspo.tools.rehearse.records import Collective


@dataclass
class Script:
    """rows: [N] of `ROW`, of all ranks. tensor: ranks of a replica. others_finished: [groups] 1 for
    those in flight at other clients. links, incoming, typical: of the next exchange: its (sender,
    receiver) pairs, the bytes that come to this rank by sender, and those of each other part."""

    rows: np.ndarray
    tensor: int
    others_finished: np.ndarray
    links: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    incoming: Mapping[int, bytes] = field(default_factory=dict)
    typical: int = 0

    def exchange(
        self, source: np.ndarray, target: np.ndarray, incoming: Mapping[int, bytes], typical: int
    ) -> None:
        """The next exchange is from each source to its target."""
        links = np.unique(np.stack([source, target], axis=1).astype(np.int64), axis=0)
        self.links, self.incoming, self.typical = (
            links[links[:, 0] != links[:, 1]],
            incoming,
            typical,
        )

    def sum(self, own: Tensor, group: Any) -> np.ndarray:
        """What the ranks of the group sum up to, by the function that asks."""
        callers, world, me = _callers(), dist.get_world_size(), group.rank()
        if "rows_in_place" in callers:
            if own.dim() == 1:
                return np.array([len(self.rows)])
            words = self.rows.view(np.int64).reshape(len(self.rows), ROW.itemsize // 8)
            assert tuple(own.shape) == (len(words), 1 + words.shape[1])
            mine = own.numpy()[:, 0] == 1
            assert np.array_equal(own.numpy()[mine, 1:], words[mine]), (
                "this rank's rows are as scripted"
            )
            return np.concatenate([np.ones((len(words), 1), dtype=np.int64), words], axis=1)
        if "replica_homes" in callers:
            return np.arange(world) // self.tensor
        if "_first_ranks" in callers:
            return np.arange(world // self.tensor) * self.tensor
        if "exchange_bytes" in callers:
            assert len(own) == len(self.links)
            return np.array(
                [
                    len(self.incoming[a]) if b == me else n if a == me else self.typical
                    for (a, b), n in zip(self.links.tolist(), own.tolist(), strict=True)
                ]
            )
        return own.numpy()

    def largest(self, own: Tensor) -> np.ndarray:
        if "_select" in _callers():
            return np.maximum(
                own.numpy(), np.stack([self.others_finished, 0 * self.others_finished], axis=1)
            )
        return own.numpy()

    def arrived(self) -> np.ndarray:
        """What an exchange brings, by sender."""
        return np.frombuffer(
            b"".join(self.incoming[rank] for rank in sorted(self.incoming)), dtype=np.uint8
        )


class ScriptedWorld(TorchDispatchMode):
    """Records this rank's collectives and completes them by the script."""

    def __init__(self, script: Script, state: bytes) -> None:
        super().__init__()
        # What rank 0 sends, again and again.
        self.state = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        self.script, self.log = script, CollectiveLog(HostLog(), KnownValues(), gpu_only=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        name, sent, received, given, group = self.log.record(func, args, kwargs or {})
        if name == "allreduce":
            is_sum = self.log._calls[-1][0].reduction == "sum"
            [own] = sent
            own.copy_(
                torch.from_numpy(
                    self.script.sum(own, group) if is_sum else self.script.largest(own)
                )
            )
        elif name == "alltoall_base":
            assert received[0].numel() == sum(map(len, self.script.incoming.values()))
            received[0].copy_(torch.from_numpy(self.script.arrived().copy()))
        else:
            assert name == "broadcast", f"{name} is not scripted"
            if given["root_rank"] != group.rank():
                [tensor] = received
                is_size = tensor.dtype == torch.int64
                tensor.copy_(torch.tensor([len(self.state)]) if is_size else self.state)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within the context collectives are recorded under this phase."""
        self.log.host.phase = name
        yield

    @property
    def calls(self) -> tuple[Collective, ...]:
        return self.log.collectives


@contextlib.contextmanager
def scripted_world(rank: int, size: int, script: Script, state: object) -> Iterator[ScriptedWorld]:
    """Within the context this process is `rank` of a world of gloo.

    state: the value of what rank 0 does.
    """
    world = ScriptedWorld(script, encode(Outcome(value=encode(state))))
    with fake_world(rank, size, world.log, backend="gloo"), world:
        yield world


def _callers() -> set[str]:
    """Names of the functions that wait for this one."""
    names: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
