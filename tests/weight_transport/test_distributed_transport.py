"""One broadcast for all servers, kept groups, and servers that fail.

The servers implement SGLang's protocol.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

import pytest
import torch
from torch import Tensor

from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
from megatron_gspo.weight_transport import distributed_transport
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.update_group import UpdateGroup
from tests.support.server_engine import update_servers
from tests.support.weight_server import checksum, weight_servers

SIZE = 40_000  # bytes of a tensor, and of a bucket
COUNT = 12


class Client:
    """A source and its servers, as (URL, process id)."""

    def __init__(self, servers: list[tuple[str, int]]) -> None:
        self.loop = EventLoop()
        self.session = self.loop.run(open_session())
        self.servers = dict(servers)
        self.urls = list(self.servers)
        self.transport = DistributedTransport(SGLangAPI(), address="127.0.0.1")
        self.read = 0

    def close(self) -> None:
        self.transport.close()
        self.loop.run(self.session.close())
        self.loop.close()

    def weights(
        self, version: int, at: Callable[[int], None] = lambda number: None
    ) -> Iterator[tuple[str, Tensor]]:
        """at: called with the number of each tensor before it is read."""
        self.read += 1
        for number in range(COUNT):
            at(number)
            yield f"t{number}", torch.full((SIZE // 4,), float(version * 100 + number))

    def update(
        self,
        version: int,
        at: Callable[[int], None] = lambda number: None,
        timeout: float = 20.0,
        more: tuple[tuple[str, Tensor], ...] = (),
    ) -> dict[str, str]:
        servers = [ServerClient(url, self.session) for url in self.urls]
        return update_servers(
            self.loop,
            servers,
            lambda: chain(more, self.weights(version, at)),
            self.transport,
            version=f"v:{version}",
            bucket_bytes=SIZE * self.transport.in_flight,
            timeout=timeout,
        )

    def get(self, url: str, path: str) -> dict:
        return self.loop.run(ServerClient(url, self.session).get(path, timeout=60))

    def assert_holds(self, url: str, version: int) -> int:
        """The server has these weights and this version; the number of buckets that it has
        received.
        """
        held = self.get(url, "/held")
        truth = {name: checksum(tensor) for name, tensor in self.weights(version)}
        assert {name: held["held"].get(name) for name in truth} == truth
        assert self.get(url, "/model_info")["weight_version"] == f"v:{version}"
        return held["buckets"]


@pytest.fixture
def client() -> Iterator[Client]:
    with weight_servers(4) as servers:
        client = Client(servers)
        yield client
        for pid in client.servers.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        client.close()


def test_one_broadcast_of_a_bucket_in_one_group(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[UpdateGroup] = []
    sent: list[int] = []

    class Counted(UpdateGroup):
        def __init__(self, name: str, size: int, **given) -> None:
            super().__init__(name, size, **given)
            groups.append(self)

        async def broadcast(self, data: Tensor) -> None:
            sent.append(data.numel())
            await super().broadcast(data)

    monkeypatch.setattr(distributed_transport, "UpdateGroup", Counted)
    assert client.update(1) == {} and client.update(2) == {}
    assert [client.assert_holds(url, 2) for url in client.urls] == [2 * COUNT] * 4
    assert sent == [SIZE] * 2 * COUNT and [group.size for group in groups] == [5]
    # another client has changed a server's weights: it may have left the group
    client.loop.run(
        SGLangAPI().set_version(ServerClient(client.urls[2], client.session), "x", timeout=60)
    )
    assert client.update(3) == {} and len(groups) == 2
    client.urls = client.urls[:2]
    assert client.update(4) == {} and [group.size for group in groups] == [5, 5, 3]
    assert [client.assert_holds(url, 4) for url in client.urls] == [4 * COUNT] * 2


def test_a_server_that_dies_is_dropped_and_the_others_are_updated_again(client: Client) -> None:
    assert client.update(1) == {}
    dead = client.urls[1]

    def kill(number: int) -> None:
        if number == 5 and client.read == 2:
            os.kill(client.servers[dead], signal.SIGKILL)

    began = time.monotonic()
    failures = client.update(2, kill)
    assert list(failures) == [dead] and failures[dead].startswith(f"server {dead}/")
    assert time.monotonic() - began < 20.0 and client.read == 3
    client.urls.remove(dead)
    for url in client.urls:
        client.assert_holds(url, 2)
    assert client.update(3) == {}


def test_a_server_that_hangs_is_dropped_within_the_deadline(client: Client) -> None:
    """The last one: no other server is behind it in the tree of a broadcast."""
    hung = client.urls[3]

    def stop(number: int) -> None:
        if number == 5 and client.read == 1:
            os.kill(client.servers[hung], signal.SIGSTOP)

    began = time.monotonic()
    failures = client.update(1, stop, timeout=8.0)
    assert time.monotonic() - began < 60.0
    assert list(failures) == [hung] and "8 s" in failures[hung]
    for url in client.urls[:3]:
        client.assert_holds(url, 1)
    os.kill(client.servers[hung], signal.SIGCONT)
    time.sleep(1.0)
    assert client.update(2) == {}  # it left the group that broke, and takes the next update
    client.assert_holds(hung, 2)


def test_an_address_of_another_machine(client: Client) -> None:
    client.transport = DistributedTransport(SGLangAPI(), address="192.0.2.1")
    failures = client.update(1)
    assert len(failures) == 4
    for url, line in failures.items():
        assert line.startswith(
            f"server {url}/init_weights_update_group: master_address=192.0.2.1: cannot listen there"
        )
