"""A weight update over links of a limited rate: network namespaces on one switch, token-bucket filters (`tc`).

Ranks of a trainer and servers are hosts of their own. The trainer's links are the limit: those of the servers are four
times as fast. For root on Linux; `real_size_weights.py` runs it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import ROOT
from benchmarks.weight_server import enter, weight_servers
from megatron_gspo.config import ServerConfig
from megatron_gspo.rollout.sglang.sglang_weight_endpoints import SGLangWeightEndpoints
from megatron_gspo.rollout.weight_distribution import WeightDistribution
from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.receiver_transport import Offer
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport
from megatron_gspo.weight_transport.update_group import UpdateGroup
from megatron_gspo.weight_transport.weight_sender import WeightSender
from megatron_gspo.weight_transport.weight_source import WeightSource, numbered
from megatron_gspo.weight_transport.weight_update import ServerUpdate, UpdatePlan, make_transport
from tests.support.network_hosts import Host, hosts, ip, why_not

RATE = 100  # Mbit/s of each of the trainer's links
BUCKETS = 16
_TENSORS = 64
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Update:
    """What is measured. sources: ranks of the trainer, each with its share of the weights. mebibytes: of all weights.
    one_group_each: a process group with each server and one bucket at a time, as before. receiver: ours, in the
    servers. repeats: timed updates, after one that makes the groups."""

    servers: int
    sources: int
    mebibytes: float
    one_group_each: bool = False
    receiver: bool = False
    repeats: int = 3


@dataclass(frozen=True)
class Cost:
    """Of one update. sent: bytes that left the trainer's hosts. broadcasts: that the trainer began."""

    seconds: float
    sent: float
    broadcasts: float


class OneGroupPerServer(DistributedTransport):
    """As before: a process group with each server, a bucket at a time to all of them."""

    in_flight = 1

    def __init__(self, endpoints: Any, *, address: str) -> None:
        super().__init__(endpoints, address=address)
        self._each: dict[str, DistributedTransport] = {}

    async def open(self, targets: Mapping[str, Target], timeout: float) -> None:
        self.targets = dict(targets)
        for url, target in targets.items():
            one = self._each.setdefault(url, DistributedTransport(self.endpoints, address=self._address))
            one.begin(self._version, 0)
            await one.open({url: target}, timeout)

    async def send(self, bucket: Bucket, timeout: float) -> None:
        async def send(one: DistributedTransport) -> None:
            await one.send(bucket, timeout)
            await one.flush(timeout)

        await asyncio.gather(*(send(one) for one in self._each.values()))

    async def finish(self, timeout: float) -> Sent:
        failures: dict[str, Any] = {}
        for one in self._each.values():
            failures |= (await one.finish(timeout)).failures
        return Sent(failures)

    def close(self) -> None:
        for one in self._each.values():
            one.close()


class _Counted(UpdateGroup):
    """Counts its broadcasts, of all groups together."""

    broadcasts = 0

    async def broadcast(self, data: torch.Tensor) -> None:
        _Counted.broadcasts += 1
        await super().broadcast(data)


class _Servers:
    """What `WeightDistribution` needs of a `ServerEngine`: updates alone."""

    def __init__(self, urls: list[str], transport: WeightTransport) -> None:
        self._loop, self._transport = EventLoop(), transport
        session = self._loop.run(open_session())
        self._clients = [ServerClient(url, session) for url in urls]

    def begin_update(self, version: int) -> UpdatePlan:
        self._update = ServerUpdate(self._loop, self._clients, self._transport, version=f"run:{version}",
                                    timeout=_TIMEOUT)  # fmt: skip
        self._update.begin()
        return self._update.plan

    def next_transfer(self) -> list[ServerInfo] | None:
        return self._update.next_transfer()

    def receive(self, offers: list[Offer], transfer: str) -> None:
        self._update.receive(offers, transfer)

    def record_transfer(self, results: list[Sent]) -> None:
        self._update.record(results)

    def finish_update(self, *, parts: int) -> None:
        self._update.finish(parts=parts)
        if self._update.failures:
            raise RuntimeError(str(self._update.failures))


def _distribution(given: dict[str, Any], update: Update) -> WeightDistribution:
    from megatron_gspo.weight_transport import distributed_transport

    distributed_transport.UpdateGroup = _Counted
    config = ServerConfig(urls=tuple(given["urls"]), num_servers=int(update.receiver), update_timeout=_TIMEOUT,
                          weight_bucket_mb=update.mebibytes / BUCKETS * 4, health_interval=_TIMEOUT)  # fmt: skip
    transport: WeightTransport = make_transport(config, SGLangWeightEndpoints(), address=given["address"])
    if update.one_group_each:
        transport = OneGroupPerServer(SGLangWeightEndpoints(), address=given["address"])
    servers: Any = _Servers(given["urls"], transport) if given["rank"] == 0 else None
    sources = numbered([WeightSource(rank) for rank in range(update.sources)])
    return WeightDistribution(servers, WeightSender(config, transport), sources)


def rank_main(given: dict[str, Any], update: Update, result: Connection | None) -> None:
    """One rank of the trainer: an update that makes the groups, then timed ones. result: of rank 0, for the cost, or
    the reason of a failure."""
    rank = given["rank"]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    enter(given["namespace"])
    store = dist.TCPStore(given["master"], 29500, update.sources, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=update.sources)
    distribution = _distribution(given, update)
    own = torch.ones(_TENSORS // update.sources, int(update.mebibytes * 2**20) // _TENSORS, dtype=torch.uint8)

    def weights(source: WeightSource | None = None, /) -> Iterator[tuple[str, torch.Tensor]]:
        if source is not None and source.rank == rank:
            yield from ((f"{rank}.{number}", tensor) for number, tensor in enumerate(own))

    failure, seconds, counts = distribution.run(weights, 0), [], []
    for version in range(1, update.repeats + 1):
        dist.barrier()
        before, began = (sent_bytes(), _Counted.broadcasts), time.perf_counter()
        failure = failure or distribution.run(weights, version)
        seconds.append(time.perf_counter() - began)
        count = torch.tensor([sent_bytes() - before[0], _Counted.broadcasts - before[1]], dtype=torch.float64)
        dist.all_reduce(count)
        counts.append(count.tolist())
    if result is not None:
        sent, broadcasts = (statistics.median(values) for values in zip(*counts, strict=True))
        result.send(str(failure) if failure else Cost(statistics.median(seconds), sent, broadcasts))
    os._exit(0)  # the servers still hold the groups


def sent_bytes() -> int:
    """That have left this process's host."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def reason_against() -> str:
    """Why there can be no limited links here; "" where there can."""
    return why_not() or ("" if shutil.which("tc") else "there is no tc (Debian's iproute2)")


@dataclass(frozen=True)
class Links:
    """A trainer's hosts and servers on others; see `limited_links`."""

    trainer: Sequence[Host]
    urls: Sequence[str]

    def cost_of(self, update: Update) -> Cost:
        """Medians of the timed updates. Raises RuntimeError if one fails."""
        context = multiprocessing.get_context("forkserver")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name belongs to an address of these hosts
        context.set_forkserver_preload(["benchmarks.weight_links"])
        given = {"urls": self.urls[: update.servers], "master": self.trainer[0].address}
        reader, writer = context.Pipe(duplex=False)
        ranks = []
        for rank, host in enumerate(self.trainer[: update.sources]):
            own = given | {"rank": rank, "address": host.address, "namespace": _namespace(host)}
            ranks.append(context.Process(target=rank_main, args=(own, update, None if rank else writer), daemon=True))
            ranks[-1].start()
        writer.close()
        try:
            if not reader.poll(2 * _TIMEOUT):
                raise RuntimeError(f"{update}: no end")
            cost = reader.recv()
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if isinstance(cost, str):
            raise RuntimeError(cost)
        return cost


@contextmanager
def limited_links(ranks: int, servers: int) -> Iterator[Links]:
    """Hosts for so many ranks of a trainer and servers."""
    with hosts(ranks + servers) as found:
        for number, host in enumerate(found):
            rate = RATE if number < ranks else 4 * RATE
            ip("netns", "exec", host.name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{rate}mbit",
               "burst", "64kb", "latency", "500ms")  # fmt: skip
        with weight_servers(*[(_namespace(host), host.address) for host in found[ranks:]]) as running:
            yield Links(found[:ranks], [url for url, _ in running])


def _namespace(host: Host) -> str:
    return f"/var/run/netns/{host.name}"
