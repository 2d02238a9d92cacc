"""Moving new weights to servers: pause, send bucket by bucket, flush, set the version, go on.

How the bytes travel is a `Route`. What is the same for all of them is here, so that a server either serves the whole
new version or serves nothing:

1. the server stops generating (what was under way is answered with what it has, "abort") and takes a weight version
   that no client accepts;
2. the weights arrive;
3. its prefix cache is flushed, it takes the new version, says so when asked, and generates again.

A server that fails on the way keeps the version that nobody accepts until an update of it succeeds. It generates
again, as far as it still answers: a paused one doesn't answer /health either, and would pass for one that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.errors import first_line
from megatron_gspo.servers.http_client import EventLoop, Server, ServerError
from megatron_gspo.servers.server_info import Capabilities, capabilities, weight_version
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.disk_transport import DiskRoute
from megatron_gspo.weight_transport.distributed_transport import DistributedRoute
from megatron_gspo.weight_transport.tensor_transport import MemoryRoute, TensorRoute
from megatron_gspo.weight_transport.transport import Route, accepted

ROUTES = ("disk", "tensor", "distributed", "ipc")
_POLL = 0.05  # seconds between two tries to flush a server that still ends its requests
_GIVE_UP = 2.0  # longest wait, in seconds, for each further answer of a server that hasn't given one


def update_servers(
    loop: EventLoop,
    servers: Sequence[Server],
    named_tensors: Iterable[tuple[str, Tensor]],
    route: Route,
    *,
    version: str,
    bucket_bytes: int,
    timeout: float,
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """Give all `servers` the weights of a stream of (Hugging Face name, whole tensor), as weight version `version`.

    Called on one rank, from any thread but the loop's. The stream is read to its end also when every server has
    failed, since producing it may be collective. Memory: one buffer of `bucket_bytes` bytes, and what the route adds
    (see each). timeout: seconds that a server may take for one step: to pause, for one bucket, to load from disk.
    dtype: cast floating-point tensors to it before they travel; the server converts to its own in any case.

    Returns url -> one line, naming server and endpoint, for each server that failed: it may be half updated, and what
    it generates is of no version until an update of it has succeeded. The others have the new weights. Raises
    ValueError for a name that comes twice, DiskError if weights can't be written.
    """
    stream = iter(named_tensors)
    update = _Update(loop, servers, route, version, timeout)
    try:
        update.run(stream, bucket_bytes, dtype)
    except Exception:
        update.abandon()
        raise
    finally:
        for _ in stream:
            pass
    return update.failures


class _Update:
    """One update of some servers. `live`: those that haven't failed; `failures`: url -> reason."""

    def __init__(self, loop: EventLoop, servers: Sequence[Server], route: Route, version: str, timeout: float) -> None:
        self._loop, self._route, self._version, self._timeout = loop, route, version, timeout
        self.live = {server.url: server for server in servers}
        self.found: dict[str, Capabilities] = {}
        self.failures: dict[str, str] = {}

    def run(self, stream: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None) -> None:
        """All steps; where the route keeps weights of its own, servers stop only when all of them are there."""
        route = self._route
        if not route.stores:
            self._each(self._begin)
        if not self.live:
            return
        route.begin(self._version)
        for bucket in buckets(stream, bucket_bytes, dtype=dtype, device=route.device, allocate=route.allocate):
            if bucket.data.is_cuda:
                torch.cuda.current_stream(bucket.data.device).synchronize()  # other threads and processes read it
            route.take(bucket)
            if not route.stores:
                self._each(lambda server, bucket=bucket: route.send(server, bucket, self._timeout))
            if not self.live:
                return
        route.end()
        if route.stores:
            self._each(self._begin)
        self._each(self._end)

    def abandon(self) -> None:
        """Leave every server that is still in the update; it keeps the version that nobody accepts."""
        for url in self.live:
            self.failures[url] = f"server {url}: the update of its weights was given up"
        self.live, left = {}, self.live
        self._loop.run(_all(self._leave(server) for server in left.values()))

    def _each(self, step: Callable[[Server], Awaitable[Any]]) -> None:
        """One step of all live servers at once; those that fail are out."""
        self._loop.run(_all(self._guarded(step, server) for server in self.live.values()))
        self.live = {url: server for url, server in self.live.items() if url not in self.failures}

    async def _guarded(self, step: Callable[[Server], Awaitable[Any]], server: Server) -> None:
        try:
            await step(server)
        except ServerError as error:
            self.failures[server.url] = first_line(error)
            await self._leave(server, _GIVE_UP if error.status is None else self._timeout)

    async def _begin(self, server: Server) -> None:
        """Stop the server and make it ready to take weights."""
        timeout = self._timeout
        found = await capabilities(server, timeout=timeout)
        reason = self._route.refuses(found)
        if reason:
            raise ServerError(f"server {server.url}: {reason}", retry=False)
        self.found[server.url] = found
        await server.post("/pause_generation", {"mode": "abort"}, timeout=timeout)
        await _set_version(server, f"{self._version}:incomplete", timeout)
        if found.update_session and self._route.needs_session:
            await _open_session(server, timeout)
        await self._route.open(server, found, timeout)

    async def _end(self, server: Server) -> None:
        """Make the server serve what it has been given."""
        timeout = self._timeout
        await self._route.finish(server, timeout)
        if self.found[server.url].update_session and self._route.needs_session:
            await accepted(server, "/end_weight_update", {}, timeout)
        await _flush(server, timeout)
        await _set_version(server, self._version, timeout)
        said = await weight_version(server, timeout=timeout)
        if said != self._version:
            raise ServerError(f"server {server.url}/model_info: weight version {said[:80]!r} after the update to "
                              f"{self._version!r}; does someone else update it?", retry=False)  # fmt: skip
        await server.post("/continue_generation", {}, timeout=timeout)
        self._route.settled(server, self._version)

    async def _leave(self, server: Server, timeout: float = _GIVE_UP) -> None:
        """After a failure: let go of what the server holds for this update, as far as it still answers."""
        timeout = min(timeout, self._timeout)
        found = self.found.get(server.url)
        await self._route.leave(server, timeout)
        if found is None:
            return  # it has not been touched
        session = ["/end_weight_update"] if found.update_session and self._route.needs_session else []
        for path in (*session, "/continue_generation"):
            try:
                await server.post(path, {}, timeout=timeout)
            except ServerError as error:
                if error.status is None:
                    return  # it has died or hangs: don't wait for it once more


def make_route(
    name: str,
    *,
    directory: str | Path | None = None,
    source: str | Path | None = None,
    address: str = "127.0.0.1",
    backend: str | None = None,
) -> Route:
    """The route of `sglang.weight_transport`.

    directory: for "disk": where checkpoints are written, of this run alone, readable by the servers under the same
    path. source: the Hugging Face directory whose config and tokenizer go with them. address: for "distributed": this
    machine as the servers reach it. backend: "gloo" or "nccl"; None: by what the server runs on.

    Raises ValueError for an unknown name or a missing directory.
    """
    if name == "disk":
        if directory is None:
            raise ValueError("sglang.weight_transport=disk: set sglang.weight_dir, which servers read checkpoints from")
        return DiskRoute(Path(directory), source=None if source is None else Path(source))
    if name == "tensor":
        return TensorRoute()
    if name == "distributed":
        return DistributedRoute(address=address, backend=backend)
    if name == "ipc":
        return MemoryRoute()
    raise ValueError(f"sglang.weight_transport={name}: choose one of {', '.join(ROUTES)}")


async def _all(steps: Iterable[Awaitable[None]]) -> None:
    """Run all of them to their end, then raise the first thing that is no failure of a server."""
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _open_session(server: Server, timeout: float) -> None:
    """A session that an update left open, because its client died, is closed first."""
    try:
        await accepted(server, "/begin_weight_update", {}, timeout)
    except ServerError as error:
        if error.status != 400:
            raise
        await accepted(server, "/end_weight_update", {}, timeout)
        await accepted(server, "/begin_weight_update", {}, timeout)


async def _set_version(server: Server, version: str, timeout: float) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    await accepted(server, "/update_weight_version", body, timeout)


async def _flush(server: Server, timeout: float) -> None:
    """Empty the prefix cache, which old weights have filled. The server refuses with 400 while requests end."""
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            await server.post("/flush_cache", {}, timeout=timeout)
            return
        except ServerError as error:
            if error.status != 400 or asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(_POLL)
