"""The weights of all sources to the servers: rank 0 is the servers' client, every source sends its
own tensors.

A source may have relays, ranks of other nodes that send the same tensors to the servers of their
nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_gspo.errors import UserError
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.parallel.typed_messages import Type, decode, encode
from megatron_gspo.rollout.group_source import Weights
from megatron_gspo.rollout.server_engine.server_engine import ServerEngine
from megatron_gspo.weight_transport.receiver_transport import Offer
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from megatron_gspo.weight_transport.transport import Sent
from megatron_gspo.weight_transport.weight_relay import relay_groups, relayed
from megatron_gspo.weight_transport.weight_sender import WeightSender
from megatron_gspo.weight_transport.weight_source import WeightSource
from megatron_gspo.weight_transport.weight_update import UpdatePlan

T = TypeVar("T")
Source = WeightSource | None
WHOLE: tuple[Source, ...] = (None,)  # where rank 0 sends all tensors


def senders_of(source: Source) -> dict[int, tuple[str, ...] | None]:
    """Each rank that sends a source's tensors, and to which servers; None: all."""
    return {0: None} if source is None else source.senders


@dataclass(frozen=True)
class _SenderReport:
    """What a sender reports to rank 0: an encoded value, or why it has none."""

    value: bytes = b""
    error: UserError | None = None


class _FailedError(Exception):
    """Rank 0 has failed; `WeightDistribution.run` returns its error there."""


class WeightDistribution:
    """Updates the servers from `sources`, in one turn or one after the other; a collective of
    all ranks.
    """

    def __init__(
        self,
        engine: ServerEngine | None,
        sender: WeightSender | None,
        sources: Sequence[Source] = WHOLE,
    ) -> None:
        """engine: on rank 0. sender: on each rank that sends (`senders_of`). sources: see
        `mcore/weight_sources.py`. A collective of all ranks."""
        self._engine, self._sender, self._sources = engine, sender, tuple(sources)
        self._relay_groups = relay_groups(self._sources)
        self._attempts = itertools.count()
        self._failure: Exception | None = None

    def run(self, weights: Weights, version: int) -> Exception | None:
        """One update. On rank 0, why no server has the weights."""
        self._failure = None
        try:
            plan = self._on_rank_zero(lambda engine: engine.begin_update(version), UpdatePlan)
            turns = (
                [self._sources]
                if plan.all_sources_at_once
                else [(source,) for source in self._sources]
            )
            for turn in turns:
                while (
                    infos := self._on_rank_zero(_next_transfer, list[ServerInfo] | None)
                ) is not None:
                    self._transfer(turn, weights, plan, infos)
            self._on_rank_zero(lambda engine: engine.finish_update(parts=len(self._sources)))
        except _FailedError:
            return self._failure
        return None

    def close(self) -> None:
        """Close this rank's connections."""
        if self._sender is not None:
            self._sender.close()

    def _transfer(
        self,
        turn: Sequence[Source],
        weights: Weights,
        plan: UpdatePlan,
        infos: Sequence[ServerInfo],
    ) -> None:
        """The sources of a turn send at the same time; rank 0 gets their reports through the
        store of all ranks.
        """
        attempt, rank = next(self._attempts), dist.get_rank()
        senders = [(source, *sender) for source in turn for sender in senders_of(source).items()]
        served = [servers for *_, servers in senders]
        unserved = {info.url for info in infos}.difference(*(servers or () for servers in served))
        assert None in served or not unserved, f"no source sends to {sorted(unserved)}"
        mine = {
            source: number for number, (source, sender, _) in enumerate(senders) if sender == rank
        }
        if plan.with_offers:
            transfer = f"{plan.version}/{attempt}"
            offers = {number: self._own_sender.offer(infos, transfer) for number in mine.values()}
            self._report(
                f"{attempt}/offers",
                len(senders),
                offers,
                lambda engine, received: engine.receive(received, transfer),
                Offer,
            )
        results = {}
        for source in turn:
            stream = self._stream(source, weights)
            if source in mine:
                targets, part = (
                    (source.targets(infos, rank), source.number) if source else (infos, 0)
                )
                results[mine[source]] = self._own_sender.send(
                    targets, stream, version=plan.version, part=part
                )
            for _ in stream:  # producing it is a collective
                pass
        self._report(
            f"{attempt}/results",
            len(senders),
            results,
            lambda engine, received: engine.record_transfer(received),
            Sent,
        )

    def _stream(self, source: Source, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """What a source sends, on each of the ranks that send it."""
        stream = weights(source)
        group = self._relay_groups.get(source.number) if source else None
        return (
            iter(stream) if source is None or group is None else relayed(stream, source.rank, group)
        )

    @property
    def _own_sender(self) -> WeightSender:
        assert self._sender is not None, "every source has a sender"
        return self._sender

    def _report(
        self,
        name: str,
        count: int,
        own: Mapping[int, Any],
        take: Callable[[Any, list[Any]], None],
        expected: Type = Any,
    ) -> None:
        """Values of the senders of a turn to rank 0, in their order.

        own: of this rank, by place; a `UserError` in place of a value that a sender could not make.
        expected: the type of the others.
        """
        store = dist.distributed_c10d._get_default_store()
        for number, value in own.items():
            failed = isinstance(value, UserError)
            report = _SenderReport(error=value) if failed else _SenderReport(encode(value))
            store.set(f"weights/{name}/{number}", encode(report))  # type: ignore[arg-type]  # bytes, as they are
        keys = [f"weights/{name}/{number}" for number in range(count)]

        def collect(engine: Any) -> None:
            reports: list[_SenderReport] = [decode(store.get(key), _SenderReport) for key in keys]
            values = [report.error or decode(report.value, expected) for report in reports]
            for key in keys:
                store.delete_key(key)
            take(engine, values)

        self._on_rank_zero(collect)

    def _on_rank_zero(self, action: Callable[[Any], T], returns: Type = Any) -> T:
        """`action` with the engine on rank 0, its value on every rank; `_FailedError` on every
        rank if it raises.
        """

        def guarded() -> tuple[bool, T | None]:
            try:
                return True, action(self._engine)
            except Exception as error:
                self._failure = error
                return False, None

        succeeded, value = run_on_rank_zero(guarded, returns=tuple[bool, returns | None])
        if not succeeded:
            raise _FailedError
        return value  # type: ignore[return-value]


def _next_transfer(engine: ServerEngine) -> list[ServerInfo] | None:
    return engine.next_transfer()
