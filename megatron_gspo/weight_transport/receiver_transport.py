"""Weights by broadcast from all sources at the same time, to servers that the run has started
with our receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.servers.http_client import JsonObject, ServerError
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.receiver.megatron_gspo_receiver import checksum
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.transport import Sent, Target

RECEIVER_FOLDER = Path(__file__).resolve().parent / "receiver"
_POLL_SECONDS = 0.02  # between two looks at the servers' answers
_CONNECT = timedelta(seconds=2)
_WATCH_SECONDS = 0.5  # between two looks at what ends a transfer


@dataclass(frozen=True)
class Offer:
    """What a server needs to join a source's process group; see
    `receiver/megatron_gspo_receiver.py`.
    """

    name: str
    address: str
    port: int
    size: int
    backend: str


class ReceiverTransport(DistributedTransport):
    """Like `DistributedTransport`, without requests: a server gets one for all sources
    (`receive_request`).

    A source describes each bucket in the store of its group, and reads there what the servers
    answer. An error of a server does not end a transfer; a broken group does, for all of its
    servers, and whoever sent the requests knows which servers have failed.

    changes_only: tensors whose bytes are those of the last update are not sent. checksums: the
    servers compare the checksum of every tensor, sent or not, with that of what they loaded.
    """

    def __init__(
        self,
        endpoints: WeightEndpoints,
        *,
        address: str | None = None,
        changes_only: bool = False,
        checksums: bool = False,
    ) -> None:
        super().__init__(endpoints, address=address, checksums=checksums)
        self._changes_only = changes_only
        self._transfer = ""
        self._number = 0
        self._sums: dict[str, int] = {}  # of this transfer
        # Of the last transfer, if all servers of the group completed it.
        self._known: dict[str, int] = {}

    def unsupported(self, info: ServerInfo) -> str:
        """See `WeightTransport.unsupported`: servers without the receiver, too."""
        if info.receiver is False:
            return (
                "has no receiver of weights; start it with megatron-gspo serve, or use"
                " weight_transport=disk"
            )
        return super().unsupported(info)

    def takes_all_sources(self, infos: list[ServerInfo]) -> bool:
        """See `WeightTransport.takes_all_sources`."""
        return True

    def offer(self, targets: Mapping[str, Target], transfer: str, timeout: float) -> Offer:
        """The group that the servers are to join for a transfer: the last one if they are
        unchanged since.
        """
        self._transfer = transfer
        if not self._is_current(targets):
            self.close()
            self._known = {}
            self._group = self._new_group([target.info for target in targets.values()], timeout)
            self._members = {url: target.info.start_id for url, target in targets.items()}
        group = self._group
        assert group is not None
        return Offer(group.name, group.address, group.port, group.size, group.backend)

    async def open(self, targets: Mapping[str, Target], timeout: float) -> None:
        """Join the group of the offer."""
        self._start(targets)
        self._number = 0
        self._sums = {}
        self._watching = asyncio.create_task(self._watch())
        if not self._joined:
            assert self._group is not None, "an offer comes first"
            self._broadcasts.append(asyncio.create_task(self._group.join()))
            await self._wait(timeout, 0)
            self._joined = not self._broken

    def select(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """See `WeightTransport.select`."""
        if not (self._changes_only or self.checksums):
            return tensors
        return self._changed(tensors)

    def _changed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:  # `yield from` would close the stream with this generator
            self._sums[name] = checksum(tensor.detach().contiguous().view(-1).view(torch.uint8))
            if not self._changes_only or self._sums[name] != self._known.get(name):
                yield name, tensor

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""
        if self.is_over or self._group is None:
            return
        entries = [
            (
                entry.name,
                str(entry.dtype).removeprefix("torch."),
                entry.shape,
                entry.start,
                entry.stop,
            )
            for entry in bucket.entries
        ]
        self._write_entry(self._number, {"entries": entries, "nbytes": bucket.nbytes})
        self._number += 1
        self._broadcasts.append(asyncio.create_task(self._group.broadcast(bucket.data)))
        await self._wait(timeout, self.in_flight - 1)

    async def finish(self, timeout: float) -> Sent:
        """See `WeightTransport.finish`."""
        await self._wait(timeout, 0)
        if not self._broken:
            self._write_entry(self._number, {"sums": self._sums if self.checksums else {}})
            answers = await self._answers(timeout)
        if self._broken:
            await self.abort()
            return Sent({}, tuple(self.targets))
        assert self._group is not None
        for number in range(self._number + 1):
            self._group.remove(f"{self._transfer}/{number}")
        start = 0
        for url, target in self.targets.items():
            of_server = answers[start : start + target.info.tp_size]
            start += target.info.tp_size
            errors = [answer for answer in of_server if answer]
            if errors:
                self.failures[url] = ServerError(
                    f"server {url}: {errors[0][:200]}", status=200, retry=False
                )
        self._completed = "" if self.failures else self._version
        self._known = {} if self.failures else self._sums
        return Sent(self.failures)

    async def abort(self) -> None:
        """See `WeightTransport.abort`."""
        self._watching.cancel()
        if self._group is not None:
            self._group.put(f"{self._transfer}/abort", "1")
            self._write_entry(self._number, {"error": "the source has left"})
        await self._cancel()
        self._completed = ""
        self._joined = False
        self._known = {}
        self.close()

    def _write_entry(self, number: int, entry: JsonObject) -> None:
        assert self._group is not None
        self._group.put(f"{self._transfer}/{number}", json.dumps(entry))

    async def _watch(self) -> None:
        """Break the group where the sender of the requests or a server reports that it is
        broken.
        """
        group = self._group
        assert group is not None
        ranks = [f"{self._transfer}/done/{rank}" for rank in range(1, group.size)]
        while not self._broken:
            await asyncio.sleep(_WATCH_SECONDS)
            if group.has([f"{self._transfer}/abort"]):
                self._break("a server has failed")
            elif any(group.has([key]) and group.get(key).startswith("broken: ") for key in ranks):
                self._break("the group of a server is broken")

    async def _answers(self, timeout: float) -> list[str]:
        """The last message of each rank of the servers; breaks the group at the timeout."""
        assert self._group is not None
        keys = [f"{self._transfer}/done/{rank}" for rank in range(1, self._group.size)]
        deadline = asyncio.get_running_loop().time() + timeout
        while not self._group.has(keys):
            if self._broken or asyncio.get_running_loop().time() > deadline:
                self._break(f"no answer within {timeout:.0f} s")
                return []
            await asyncio.sleep(_POLL_SECONDS)
        answers = [self._group.get(key) for key in keys]
        self._watching.cancel()
        for key in keys:
            self._group.remove(key)
        return answers


def receive_requests(
    offers: list[Offer], transfer: str, infos: list[ServerInfo], *, timeout: float, checksums: bool
) -> dict[str, list[JsonObject]]:
    """URL -> the request for each tensor-parallel rank of that server; they are numbered in the
    order of `infos`.
    """
    common = {
        "transfer": transfer,
        "timeout": timeout,
        "checksums": checksums,
        "sources": [asdict(offer) for offer in offers],
    }
    requests: dict[str, list[JsonObject]] = {}
    first = 1
    for info in infos:
        requests[info.url] = [common | {"rank": first + number} for number in range(info.tp_size)]
        first += info.tp_size
    return requests


def abort_transfer(offer: Offer, transfer: str) -> None:
    """Report to a source of a transfer that a server has failed."""
    with contextlib.suppress(RuntimeError):  # it has ended already
        store = dist.TCPStore(
            offer.address, offer.port, None, False, _CONNECT, wait_for_workers=False
        )
        dist.PrefixStore(f"{offer.name}/transfers", store).set(f"{transfer}/abort", "1")
