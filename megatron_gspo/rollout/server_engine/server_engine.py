"""`RolloutEngine` on inference servers, which may fail and return during the run.

Its rank owns the servers' states.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError, UserError, first_line
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.server_engine.server_pool import NoServerError, PooledServer
from megatron_gspo.servers.http_client import ServerClient, ServerError
from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.weight_transport.receiver_transport import Offer
from megatron_gspo.weight_transport.server_endpoints import ClearedWeights, ServerInfo
from megatron_gspo.weight_transport.transport import Sent, WeightTransport
from megatron_gspo.weight_transport.weight_sender import WeightSender
from megatron_gspo.weight_transport.weight_update import ServerUpdate, UpdatePlan

_PROCESS_POLL_SECONDS = 0.5
_MEMORY_SECONDS = 120.0  # a server may take to release or restore its memory


class ServerEngine:
    """See `RolloutEngine`; `client.stream()` returns groups in the order in which they finish.

    Samples depend on (seed, prompt, sample, token) alone only if the servers are deterministic;
    with SGLang, --enable-deterministic-inference.
    """

    def __init__(
        self,
        config: ServerConfig,
        client: RolloutClient,
        transport: WeightTransport,
        *,
        processes: LocalServers | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """client: of this rank, on the servers of `urls` or of `processes`; owns their states, and
        `close` closes it. transport: how weights reach the servers. processes: started servers,
        which `close` stops. log: takes a line for each event at the servers.
        """
        self.weight_version: int | None = None
        self.client = client
        self._config, self._transport, self._api = config, transport, client.requests.api
        self._endpoints = transport.endpoints
        self._processes, self._log = processes, log
        self._loop, self._pool, self._client = client.loop, client.pool, client.requests
        self._run_id = secrets.token_hex(4)  # marks this run's weights among those of other runs
        self.sender = WeightSender(config, transport)
        self._memory_released = False
        self._update: ServerUpdate | None = None
        self._targets: list[PooledServer] = []  # of the update
        self._updating = 0  # its version
        self._told: set[str] = set()  # URLs of servers whose checksums prove only some parameters
        self._closed = False
        self._monitor = (
            client.watch(self._monitor_processes(processes)) if processes is not None else None
        )

    def check_servers(self) -> None:
        """Before the first update, raise `EngineError` for a server whose responses the run can't
        use, or that refuses the run, for example a wrong key. One that does not answer is waited
        for later."""

        async def reason(server: PooledServer) -> str:
            try:
                info = await self._endpoints.server_info(
                    server.client, timeout=self._config.update_timeout
                )
            except ServerError as error:
                if not error.retry:
                    raise
                return ""
            return info.unusable(
                routes=self.client.model.return_routes, colocated=self._config.colocated
            )

        async def reasons() -> dict[str, str]:
            servers = self._pool.servers
            return dict(
                zip(
                    (s.url for s in servers),
                    await asyncio.gather(*map(reason, servers)),
                    strict=True,
                )
            )

        for url, found in self._loop.run(reasons()).items():
            if found:
                raise EngineError(f"server {url}: {found}")

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """See `RolloutEngine.generate`.

        Raises `WeightsNeeded` if no server has the current weights.
        """
        stream = self.client.stream()
        tickets = stream.start(prompts, sampling, seed=seed)
        groups = dict(stream.take_tickets(len(tickets)))
        return [sample for ticket in tickets for sample in groups[ticket]]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `RolloutEngine.update_weights`: an update from this process alone. See
        `begin_update`.

        An iterator can't be sent again to servers whose process group another one broke: they fail
        too.
        """
        once = iter(named_tensors) is named_tensors
        try:
            plan = self.begin_update(version)
            attempts = 0
            while (infos := self.next_transfer()) is not None:
                attempts += 1
                if once and attempts > 1:
                    lost = ServerError(
                        "its process group broke, and the weights can't be read again", retry=True
                    )
                    self.record_transfer([Sent({info.url: lost for info in infos})])
                else:
                    if plan.with_offers:
                        transfer = secrets.token_hex(6)
                        self.receive([self.sender.offer(infos, transfer)], transfer)
                    self.record_transfer(
                        [self.sender.send(infos, named_tensors, version=plan.version)]
                    )
            self.finish_update(parts=1)
        finally:
            for _ in named_tensors if once else ():  # producing it may be collective
                pass

    def begin_update(self, version: int) -> UpdatePlan:
        """Pause the servers for new weights. Requests are interrupted and continue under the new
        weights.

        Followed by `next_transfer` and `record_transfer` for each source (or for all at once), then
        by `finish_update`. An exception of one of them ends the update. With the current version,
        only servers that lack it are updated, and nothing is interrupted.
        """
        pool, wire_version = self._pool, self._wire_version(version)
        repeated = not self.interrupts(version)
        if not repeated:
            self._loop.run(self._client.interrupt())
            self._loop.run(pool.set_version(wire_version, ()))
            self._client.current_version = version
        targets = pool.stale if repeated else self._loop.run(self._responding())
        update = ServerUpdate(
            self._loop,
            [server.client for server in targets],
            self._transport,
            version=wire_version,
            timeout=self._config.update_timeout,
        )
        self._update, self._targets, self._updating = update, targets, version
        with self._abandoned_on_error():
            if self._memory_released:
                self._restore_memory("weights")
            update.begin()
            return update.plan

    def interrupts(self, version: int) -> bool:
        """Whether an update to `version` interrupts the requests.

        Those of other clients are interrupted before it.
        """
        current = self._pool.version == self._wire_version(version)
        return not current or not self._pool.serving or self._memory_released

    def _wire_version(self, version: int) -> str:
        return f"{self._run_id}:{version}"

    def next_transfer(self) -> list[ServerInfo] | None:
        """See `ServerUpdate.next_transfer`."""
        with self._abandoned_on_error():
            return self._running_update.next_transfer()

    def receive(self, offers: Sequence[Offer | UserError], transfer: str) -> None:
        """See `ServerUpdate.receive`. Raises the error of a source."""
        with self._abandoned_on_error():
            if errors := [offer for offer in offers if isinstance(offer, UserError)]:
                raise errors[0]
            self._running_update.receive(
                [offer for offer in offers if isinstance(offer, Offer)], transfer
            )

    def record_transfer(self, results: Sequence[Sent | UserError]) -> None:
        """See `ServerUpdate.record`. Raises the error of a source."""
        with self._abandoned_on_error():
            if errors := [result for result in results if isinstance(result, UserError)]:
                raise errors[0]
            self._running_update.record([result for result in results if isinstance(result, Sent)])

    def finish_update(self, *, parts: int) -> None:
        """Serve the new weights. A server whose update failed gets no requests until an update
        succeeds.

        parts: number of sources. Raises `NoServerError` if no server serves.
        """
        with self._abandoned_on_error():
            self._running_update.finish(parts=parts)
            if self._memory_released:
                self._restore_memory("kv_cache")
                self._memory_released = False
        update, self._update = self._running_update, None
        self._report_proofs(update.cleared)
        self._loop.run(self._apply_update(self._targets, update.failures))
        self._loop.run(self._pool.resume())
        self.weight_version = self._updating
        if not self._pool.serving:
            raise NoServerError(f"no server took weights {self._updating}: {self._pool.describe()}")

    def _report_proofs(self, cleared: Mapping[str, ClearedWeights]) -> None:
        """Log, once per server, how many parameters its checksums can prove, unless all."""
        for url, parameters in cleared.items():
            proven = len(parameters.digests)
            if proven < parameters.total and url not in self._told:
                total = parameters.total
                self._log(
                    f"{url}: its checksums prove {proven} of {total} parameters; the others were"
                    " zero, or are packed for its kernel"
                )
                self._told.add(url)

    @property
    def _running_update(self) -> ServerUpdate:
        assert self._update is not None, "begin_update comes first"
        return self._update

    @contextlib.contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """End the update where the block raises."""
        try:
            yield
        except BaseException:
            update, self._update = self._update, None
            if update is not None:
                update.abandon()
            self._loop.run(self._pool.resume())
            raise

    def wait_for_server(self, seconds: float) -> bool:
        """Whether a server responds within `seconds`."""
        end = time.monotonic() + seconds
        while (
            not (found := any(server.alive for server in self._pool.servers))
            and time.monotonic() < end
        ):
            time.sleep(0.2)
        return found

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """By URL of each serving server: its log-probs (temperature 1) [L-1] of the tokens [L] of
        each sequence but the first. A server that fails is left out and counted as failed."""

        async def score_on(server: PooledServer) -> list[np.ndarray] | None:
            try:
                return [
                    await self._client.score(server.client, tokens.tolist()) for tokens in sequences
                ]
            except EngineError as error:
                await self._pool.mark_failed(server, str(error))
                return None

        async def score_on_all() -> dict[str, list[np.ndarray]]:
            servers = self._pool.serving
            found = await asyncio.gather(*(score_on(server) for server in servers))
            return {
                server.url: each
                for server, each in zip(servers, found, strict=True)
                if each is not None
            }

        return self._loop.run(score_on_all())

    @property
    def num_serving(self) -> int:
        """Servers that may get requests."""
        return len(self._pool.serving)

    def pause(self) -> None:
        """Interrupt generation, which continues later; where colocated, the servers release
        their GPU memory.
        """
        self._loop.run(self._client.interrupt())
        if self._config.colocated and not self._memory_released:
            # A server that is not idle fails on the release.
            self._loop.run(self._pool.wait_for_checks())
            self._on_all_servers(
                lambda client: self._api.release_memory(client, timeout=_MEMORY_SECONDS)
            )
            self._memory_released = True

    def resume(self) -> None:
        """Undo `pause`. Released memory is restored by the next update, which brings the
        weights.
        """
        if not self._memory_released:
            self._loop.run(self._pool.resume())

    def close(self) -> None:
        """Stop the requests and the started servers. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._monitor.cancel()
        self.sender.close()
        self.client.close()
        if self._processes is not None:
            self._processes.stop()

    async def _responding(self) -> list[PooledServer]:
        """Servers that can take weights now. One that does not respond would delay the update by
        its timeout.

        Raises `ServerError` if waiting cannot help: a wrong key, or no inference server.
        """
        servers = [server for server in self._pool.servers if server.alive]
        faults = await asyncio.gather(*(self._pool.ping(server) for server in servers))
        final = [fault for fault in faults if fault is not None and not fault.retry]
        if servers and len(final) == len(servers):
            raise final[0]
        return [server for server, fault in zip(servers, faults, strict=True) if fault is None]

    async def _apply_update(
        self, targets: Sequence[PooledServer], failures: Mapping[str, ServerError]
    ) -> None:
        version = self._pool.version
        assert version is not None
        for server in targets:
            if (error := failures.get(server.url)) is not None:
                reason = first_line(error)
                await self._pool.mark_stale(server, reason)
                self._log(f"weights {version.partition(':')[2]}: {reason}")
                await self._pool.ping(server)
        updated = [server for server in targets if server.url not in failures and server.alive]
        await self._pool.set_version(version, updated)

    def _restore_memory(self, kind: str) -> None:
        self._on_all_servers(
            lambda client: self._api.restore_memory(client, kind, timeout=_MEMORY_SECONDS)
        )

    def _on_all_servers(self, command: Callable[[ServerClient], object]) -> None:
        async def run() -> None:
            for server in [server for server in self._pool.servers if server.alive]:
                try:
                    await command(server.client)  # type: ignore[misc]
                except ServerError as error:
                    await self._pool.mark_down(server, str(error))

        self._loop.run(run())

    async def _monitor_processes(self, processes: LocalServers) -> None:
        by_url = {server.url: server for server in self._pool.servers}
        while True:
            # `processes` reports the reason; health checks find who is back.
            for url in processes.poll().died:
                await self._pool.mark_down(by_url[url], "its process ended")
            for server in self._pool.servers:
                if server.unresponsive:
                    server.unresponsive = False
                    self._log(
                        f"{server.url}: does not answer ({server.reason}); it is started again"
                    )
                    await asyncio.get_running_loop().run_in_executor(
                        None, processes.restart, server.url
                    )
            await asyncio.sleep(_PROCESS_POLL_SECONDS)
