"""The weights of all sources to the servers: rank 0 is the servers' client, every source sends its
own tensors.

A source may have relays, ranks of other nodes that send the same tensors to the servers of their
nodes.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import DiskError, EngineError, InputError, UserError
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.parallel.typed_messages import Type, decode, encode
from megatron_gspo.rollout.group_source import Weights
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.server_engine.server_pool import NoServerError, PooledServer
from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
from megatron_gspo.servers.server_launch import read_api_key
from megatron_gspo.terminal import get_logger
from megatron_gspo.weight_transport.receiver_transport import Offer, ReceiverTransport
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport
from megatron_gspo.weight_transport.update_group import GroupError
from megatron_gspo.weight_transport.weight_relay import relay_groups, relayed
from megatron_gspo.weight_transport.weight_source import WeightSource
from megatron_gspo.weight_transport.weight_update import ServerUpdate, UpdatePlan

logger = get_logger(__name__)

T = TypeVar("T")
Source = WeightSource | None
WHOLE: tuple[Source, ...] = (None,)  # where rank 0 sends all tensors


def senders_of(source: Source) -> dict[int, tuple[str, ...] | None]:
    """Each rank that sends a source's tensors, and to which servers; None: all."""
    return {0: None} if source is None else source.senders


@dataclass(frozen=True)
class _Sender:
    """A rank that sends a source's tensors."""

    source: Source
    rank: int
    servers: tuple[str, ...] | None
    """URLs of those that it sends to; None: all."""


@dataclass(frozen=True)
class _SenderReport:
    """What a sender reports to rank 0: an encoded value, or why it has none."""

    value: bytes = b""
    error: UserError | None = None


class _FailedError(Exception):
    """Rank 0 has failed; `WeightSync.run` returns its error there."""


class WeightSync:
    """Updates the servers from `sources`, in one turn or one after the other; a collective of
    all ranks.
    """

    def __init__(
        self,
        config: ServerConfig,
        client: RolloutClient | None,
        transport: WeightTransport | None,
        sources: Sequence[Source] = WHOLE,
        *,
        log: Callable[[str], None] = logger.info,
    ) -> None:
        """Prepare updates of the servers. A collective of all ranks.

        Args:
            client: of the servers; rank 0's is used.
            transport: on rank 0 and on each rank that sends (`senders_of`).
            sources: see `mcore/weight_sources.py`.
            log: takes lines about the servers, on rank 0.
        """
        self._config = config
        self._client = client
        self._transport = transport
        self._sources = tuple(sources)
        self._log = log
        self._run_id = secrets.token_hex(4)  # marks this run's weights among those of other runs
        self._relay_groups = relay_groups(self._sources)
        self._attempts = itertools.count()
        self._loop: EventLoop | None = None  # of this rank's transfers, from the first one on
        self._failure: Exception | None = None
        self._update: ServerUpdate | None = None
        self._targets: list[PooledServer] = []  # of the update
        self._version = 0  # of the update
        self._told: set[str] = set()  # URLs of servers whose checksums prove only some parameters

    def run(self, weights: Weights, version: int) -> Exception | None:
        """One update. On rank 0, why no server has the weights.

        Requests are interrupted and continue under the new weights. With the current version, only
        servers that lack it are updated, and nothing is interrupted. A server whose update failed
        gets no requests until an update succeeds.
        """
        self._failure = None
        self._version = version
        try:
            plan = self._on_rank_zero(self._begin, UpdatePlan)
            turns: list[tuple[Source, ...]] = [(source,) for source in self._sources]
            if plan.all_sources_at_once:
                turns = [self._sources]
            for turn in turns:
                while (infos := self._next_transfer()) is not None:
                    self._transfer(turn, weights, plan, infos)
            self._on_rank_zero(self._finish)
        except _FailedError:
            return self._failure
        return None

    def interrupts(self, version: int) -> bool:
        """Whether an update to `version` interrupts the requests; on rank 0.

        Those of other clients are interrupted before it.
        """
        pool = self._rank_zero_client.pool
        is_current = pool.version == self._wire_version(version)
        return not is_current or not pool.serving or self._rank_zero_client.memory_released

    def close(self) -> None:
        """Close this rank's connections. May be called again."""
        if self._transport is not None:
            self._transport.close()
        if self._loop is not None:
            self._loop.run(self._session.close())
            self._loop.close()
            self._loop = None

    # -- steps of rank 0

    def _next_transfer(self) -> list[ServerInfo] | None:
        """The servers of the next transfer, on every rank; None when the turn is complete."""
        return self._on_rank_zero(
            lambda: self._running_update.next_transfer(), list[ServerInfo] | None
        )

    def _begin(self) -> UpdatePlan:
        """Pause the servers for new weights."""
        client = self._rank_zero_client
        wire_version = self._wire_version(self._version)
        self._targets = client.begin_update(
            wire_version, self._version, interrupts=self.interrupts(self._version)
        )
        self._update = ServerUpdate(
            client.loop,
            [server.client for server in self._targets],
            self._sending_transport,
            version=wire_version,
            timeout=self._config.update_timeout,
        )
        self._update.begin()
        return self._update.plan

    def _finish(self) -> None:
        """Serve the new weights. Raises `NoServerError` if no server does."""
        client = self._rank_zero_client
        update = self._running_update
        update.finish(num_sources=len(self._sources))
        self._report_proofs(update)
        client.end_update(self._targets, update.failures)
        self._update = None
        if not client.pool.serving:
            raise NoServerError(f"no server took weights {self._version}: {client.pool.describe()}")

    def _abandon(self) -> None:
        """End an update that cannot be completed."""
        if self._update is not None:
            self._update.abandon()
            self._update = None
        self._rank_zero_client.resume()

    def _report_proofs(self, update: ServerUpdate) -> None:
        """Log, once per server, how many parameters its checksums can prove, unless all."""
        for url, parameters in update.cleared.items():
            proven = len(parameters.digests)
            total = parameters.total
            if proven < total and url not in self._told:
                self._log(
                    f"{url}: its checksums prove {proven} of {total} parameters; the others were"
                    " zero, or are packed for its kernel"
                )
                self._told.add(url)

    def _wire_version(self, version: int) -> str:
        return f"{self._run_id}:{version}"

    @property
    def _rank_zero_client(self) -> RolloutClient:
        assert self._client is not None, "rank 0 is a client"
        return self._client

    @property
    def _running_update(self) -> ServerUpdate:
        assert self._update is not None, "an update begins first"
        return self._update

    def _on_rank_zero(self, action: Callable[[], T], returns: Type = Any) -> T:
        """`action` on rank 0, its value on every rank. If it raises, the update is abandoned, and
        every rank raises `_FailedError`.
        """

        def guarded() -> tuple[bool, T | None]:
            try:
                return True, action()
            except BaseException as error:  # an interrupt, too, must let go of the servers
                self._abandon()
                if not isinstance(error, Exception):
                    raise
                self._failure = error  # any: the other ranks must hear of it
                return False, None

        succeeded, value = run_on_rank_zero(guarded, returns=tuple[bool, returns | None])
        if not succeeded:
            raise _FailedError
        return value  # type: ignore[return-value]

    # -- steps of the sources

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
        attempt = next(self._attempts)
        rank = dist.get_rank()
        senders = [
            _Sender(source, sender_rank, servers)
            for source in turn
            for sender_rank, servers in senders_of(source).items()
        ]
        _check_all_served(infos, senders)
        number_of_source = {  # of those that this rank sends
            sender.source: number for number, sender in enumerate(senders) if sender.rank == rank
        }
        if plan.with_offers:
            transfer = f"{plan.version}/{attempt}"
            offers = {number: self._offer(infos, transfer) for number in number_of_source.values()}
            self._report(
                f"{attempt}/offers",
                len(senders),
                offers,
                lambda received: self._running_update.receive(received, transfer),
                Offer,
            )
        results = {}
        for source in turn:
            stream = self._stream(source, weights)
            if source in number_of_source:
                results[number_of_source[source]] = self._send(source, infos, stream, plan.version)
            for _ in stream:  # producing it is a collective
                pass
        self._report(
            f"{attempt}/results",
            len(senders),
            results,
            lambda received: self._running_update.record(received),
            Sent,
        )

    def _stream(self, source: Source, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """What a source sends, on each of the ranks that send it."""
        stream = weights(source)
        if source is None:
            return iter(stream)
        group = self._relay_groups.get(source.number)
        if group is None:
            return iter(stream)
        return relayed(stream, source.rank, group)

    def _offer(self, infos: Sequence[ServerInfo], transfer: str) -> Offer | UserError:
        """What the servers need to join this source's process group; or why it can't make one."""
        transport = self._sending_transport
        assert isinstance(transport, ReceiverTransport)
        try:
            return transport.offer(self._connected(infos), transfer, self._config.update_timeout)
        except GroupError as error:
            return EngineError(f"{self._config.section}.{error}")

    def _send(
        self,
        source: Source,
        infos: Sequence[ServerInfo],
        stream: Iterator[tuple[str, Tensor]],
        version: str,
    ) -> Sent | UserError:
        """Send a source's tensors to the servers, which rank 0 has paused; or why it can't, for
        all of them.
        """
        if source is not None:
            infos = source.targets(infos, dist.get_rank())
        targets = self._connected(infos)
        assert self._loop is not None
        self._sending_transport.begin(version, source.number if source else 0)
        try:
            return self._sending_transport.transfer(
                self._loop,
                targets,
                stream,
                bucket_bytes=int(self._config.weight_bucket_mb * 2**20),
                timeout=self._config.update_timeout,
            )
        except DiskError as error:
            return error
        except ValueError as error:
            return InputError(str(error))

    def _connected(self, infos: Sequence[ServerInfo]) -> dict[str, Target]:
        """Clients of these servers in this rank's own event loop, by URL."""
        if self._loop is None:
            self._loop = EventLoop()
            self._session = self._loop.run(open_session())
            self._key = read_api_key(self._config)
        return {
            info.url: Target(ServerClient(info.url, self._session, api_key=self._key), info)
            for info in infos
        }

    @property
    def _sending_transport(self) -> WeightTransport:
        assert self._transport is not None, "every source has a transport"
        return self._transport

    def _report(
        self,
        name: str,
        count: int,
        values: Mapping[int, T | UserError],
        handle: Callable[[list[T]], None],
        expected: type[T],
    ) -> None:
        """Values of the senders of a turn to rank 0, in their order.

        Args:
            values: of this rank, by number of the sender; a `UserError` in place of a value that a
                sender could not make, which ends the update.
            handle: takes the values on rank 0.
            expected: their type.
        """
        store = dist.distributed_c10d._get_default_store()
        for number, value in values.items():
            if isinstance(value, UserError):
                report = _SenderReport(error=value)
            else:
                report = _SenderReport(encode(value))
            store.set(f"weights/{name}/{number}", encode(report))  # type: ignore[arg-type]  # bytes, as they are
        keys = [f"weights/{name}/{number}" for number in range(count)]

        def collect() -> None:
            reports: list[_SenderReport] = [decode(store.get(key), _SenderReport) for key in keys]
            for key in keys:
                store.delete_key(key)
            if errors := [report.error for report in reports if report.error is not None]:
                raise errors[0]
            handle([decode(report.value, expected) for report in reports])

        self._on_rank_zero(collect)


def _check_all_served(infos: Sequence[ServerInfo], senders: Sequence[_Sender]) -> None:
    """Every server gets the tensors of a source of the turn."""
    served: set[str] = set()
    for sender in senders:
        if sender.servers is None:
            return
        served.update(sender.servers)
    unserved = {info.url for info in infos} - served
    assert not unserved, f"no source sends to {sorted(unserved)}"
