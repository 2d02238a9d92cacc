"""`RolloutEngine` on SGLang servers: one process is their client; servers come, go and return while it runs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError, first_line
from megatron_gspo.rollout.sglang.client import Client, ModelFacts, RequestLimits
from megatron_gspo.rollout.sglang.request_stream import Stream
from megatron_gspo.rollout.sglang.server_pool import Fleet, FleetError, FleetSettings, Member
from megatron_gspo.servers.http_client import EventLoop, Server, ServerError, open_session
from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.weight_transport.transport import Route
from megatron_gspo.weight_transport.weight_update import update_servers

_LAUNCHER_SECONDS = 0.5  # between two questions to the launcher, which answers at once
_MEMORY_SECONDS = 120.0  # what a server may take to release or take back its memory


@dataclass(frozen=True)
class EngineSettings:
    """urls: servers, or routers. api_key: None without. recovery: seconds that the run waits while no server answers.
    update_timeout: seconds that one step of an update of the weights may take. bucket_bytes: most bytes of weights that
    are sent at once. colocated: the servers' memory is released while the trainer works."""

    urls: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    fleet: FleetSettings = FleetSettings()
    limits: RequestLimits = RequestLimits()
    recovery: float = 600.0
    update_timeout: float = 600.0
    bucket_bytes: int = 512 * 2**20
    colocated: bool = False


class SGLangEngine:
    """See `RolloutEngine`; `stream` gives groups in the order in which they finish. `is_central`: one rank generates
    for all.

    Draws depend on (seed, prompt, sample, token) alone only where servers run with --enable-deterministic-inference.
    """

    is_central = True

    def __init__(self, settings: EngineSettings, model: ModelFacts, route: Route,
                 decode: Callable[[list[int]], str], *, launcher: LocalServers | None = None,
                 say: Callable[[str], None] = print) -> None:
        """model: sizes and end tokens. route: how weights travel. decode: a response's ids to its text. launcher: of
        servers that this engine closes too. say: takes a line about what happens to the servers.

        Raises ValueError for a URL that isn't one.
        """
        self.settings, self.route = settings, route
        self.weight_version: int | None = None
        self._launcher, self._say, self._decode = launcher, say, decode
        self._loop = EventLoop()
        self._session = self._loop.run(open_session())
        servers = [Server(url, self._session, api_key=settings.api_key) for url in settings.urls]
        self._fleet = Fleet(servers, settings.fleet, say=say)
        self._client = Client(self._fleet, model, settings.limits)
        self._life = secrets.token_hex(4)  # no other run's, and no restarted server's, weights pass for these
        self._released = False
        self._closed = False
        self._watches = [self._loop.spawn(self._fleet.watch())]
        if launcher is not None:
            self._watches.append(self._loop.spawn(self._watch_launcher(launcher)))
        for watch in self._watches:
            watch.add_done_callback(self._tell_end)

    def stream(self) -> Stream:
        """A new stream of groups over the same servers."""
        return Stream(self._loop, self._client, self._decode, recovery=self.settings.recovery)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> list[Sample]:
        """See `RolloutEngine.generate`. Raises `WeightsWanted` where no server has the current weights."""
        stream = self.stream()
        tickets = stream.start(prompts, sampling, seed=seed)
        groups = dict(stream.take_tickets(len(tickets)))
        return [sample for ticket in tickets for sample in groups[ticket]]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `RolloutEngine.update_weights`. What is being drawn is interrupted and goes on under the new weights.

        With the version that is current already, only servers that lack it are updated and nothing is interrupted.
        A server that fails is out until an update succeeds. Raises `FleetError` where all fail.
        """
        fleet, wire = self._fleet, f"{self._life}:{version}"
        again = fleet.version == wire and bool(fleet.serving)
        if not again:
            self._loop.run(self._client.interrupt())
            self._loop.run(fleet.set_version(wire, ()))
            self._client.current = version
        targets = fleet.stale if again else self._loop.run(self._answering())
        if self._released:
            self._memory("resume", ["weights"])
        try:
            failures = update_servers(self._loop, [member.server for member in targets], named_tensors, self.route,
                                      version=wire, bucket_bytes=self.settings.bucket_bytes,
                                      timeout=self.settings.update_timeout)
            if self._released:
                self._memory("resume", ["kv_cache"])
                self._released = False
            self._loop.run(self._settle(targets, failures, wire))
        finally:
            self._loop.run(fleet.hold(False))
        self.weight_version = version
        if not fleet.serving:
            raise FleetError(f"no server took weights {version}: {fleet.describe()}")

    def wait_for_server(self, seconds: float) -> bool:
        """Whether a server answers within so many seconds."""
        end = time.monotonic() + seconds
        while not (found := any(member.alive for member in self._fleet.members)) and time.monotonic() < end:
            time.sleep(0.2)
        return found

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """By URL of each serving server: its log-probs (temperature 1) [L-1] of the tokens [L] of each sequence but
        the first. A server that fails at it is left out, and blamed."""
        async def one(member: Member) -> list[np.ndarray] | None:
            try:
                return [await self._client.score(member.server, tokens.tolist()) for tokens in sequences]
            except EngineError as error:
                await self._fleet.blame(member, str(error))
                return None

        async def everywhere() -> dict[str, list[np.ndarray]]:
            members = self._fleet.serving
            found = await asyncio.gather(*(one(member) for member in members))
            return {m.server.url: each for m, each in zip(members, found, strict=True) if each is not None}

        return self._loop.run(everywhere())

    def counts(self) -> dict[str, float]:
        """What happened since the last call, and how many servers serve, by the names of docs/metrics.md."""
        counts, self._client.counts = self._client.counts, type(self._client.counts)()
        sent = counts.pop("input_tokens", 0)
        cached = counts.pop("cached_tokens", 0)
        return {
            "rollout/requests": float(counts["requests"]),
            "rollout/retries": float(counts["retries"]),
            "rollout/refused": float(counts["refused"]),
            "rollout/distrusted": float(counts["distrusted"]),
            "rollout/continued": float(counts["continued"]),
            "rollout/discarded_tokens": float(counts["discarded_tokens"]),
            "rollout/cached_share": cached / sent if sent else 0.0,
            "rollout/servers": float(len(self._fleet.serving)),
        }

    def pause(self) -> None:
        """Have the servers give back what they have drawn (it goes on later), and their memory where colocated."""
        self._loop.run(self._client.interrupt())
        if self.settings.colocated and not self._released:
            self._loop.run(self._fleet.quiet())  # a server that isn't idle dies of this order
            self._memory("release", ["kv_cache", "weights"])
            self._released = True

    def resume(self) -> None:
        """Undo `pause`; where memory was released, the weights come with the next update, which takes it back."""
        if not self._released:
            self._loop.run(self._fleet.hold(False))

    def close(self) -> None:
        """Stop what runs, end the launched servers. Calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        for watch in self._watches:
            watch.cancel()
        self.route.close()
        self._loop.run(self._session.close())
        self._loop.close()
        if self._launcher is not None:
            self._launcher.stop()

    async def _answering(self) -> list[Member]:
        """Members that can take weights now: one that hangs would cost the deadline of an update, which is long.

        Raises `ServerError` where waiting mends nothing: a wrong key, or no SGLang server at all.
        """
        members = [member for member in self._fleet.members if member.alive]
        faults = await asyncio.gather(*(self._fleet.ask(member) for member in members))
        if members and all(fault is not None and not fault.retry for fault in faults):
            raise faults[0]
        return [member for member, fault in zip(members, faults, strict=True) if fault is None]

    async def _settle(self, targets: Sequence[Member], failures: dict[str, str], wire: str) -> None:
        for member in targets:
            if (reason := failures.get(member.server.url)) is not None:
                await self._fleet.distrust(member, reason)
                self._say(f"weights {wire.partition(':')[2]}: {reason}")
                await self._fleet.ask(member)
        await self._fleet.set_version(wire, [m for m in targets if m.server.url not in failures and m.alive])

    def _memory(self, action: str, tags: list[str]) -> None:
        async def everywhere() -> None:
            for member in [member for member in self._fleet.members if member.alive]:
                try:
                    await member.server.post(f"/{action}_memory_occupation", {"tags": tags}, timeout=_MEMORY_SECONDS)
                except ServerError as error:
                    await self._fleet.lose(member, str(error))

        self._loop.run(everywhere())

    def _tell_end(self, watch: Future) -> None:
        """A watch ends when it is cancelled, or by a defect, which would pass unseen."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._say(f"nobody looks after them any more ({reason}): end the run and start it again")

    async def _watch_launcher(self, launcher: LocalServers) -> None:
        by_url = {member.server.url: member for member in self._fleet.members}
        while True:
            for url in launcher.poll().died:  # the launcher tells the rest; the watch sees who is back
                await self._fleet.lose(by_url[url], "its process ended")
            for member in self._fleet.members:
                if member.hangs:
                    member.hangs = False
                    self._say(f"{member.server.url}: does not answer ({member.reason}); it is started again")
                    await asyncio.get_running_loop().run_in_executor(None, launcher.restart, member.server.url)
            await asyncio.sleep(_LAUNCHER_SECONDS)
