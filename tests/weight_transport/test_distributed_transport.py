"""Process groups of a broadcast: one per server, kept while the server is unchanged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport import distributed_transport
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.update_group import GroupError
from tests.weight_transport.test_weight_update import INFO

SERVER: Any = SimpleNamespace(url=INFO.url)


class Group:
    """In the place of `UpdateGroup`."""

    made: list[Group] = []

    def __init__(self, name: str, size: int, *, address: str, backend: str, timeout: float) -> None:
        if address == "192.0.2.1":
            raise GroupError("cannot listen there")
        self.name, self.size, self.dropped, self.broadcasts = name, size, False, 0
        self.failure: GroupError | None = None
        Group.made.append(self)

    async def join(self) -> None: ...

    async def broadcast(self, data: torch.Tensor) -> None:
        if self.failure:
            raise self.failure
        self.broadcasts += 1

    def drop(self) -> None:
        self.dropped = True


class Endpoints:
    init_group_path, broadcast_path = "/init", "/broadcast"

    def __init__(self) -> None:
        self.destroyed: list[str] = []

    async def init_group(self, server: Any, group: Any, *, timeout: float) -> None: ...

    async def load_broadcast(self, server: Any, name: str, entries: Any, *, timeout: float) -> None: ...

    async def destroy_group(self, server: Any, name: str, *, timeout: float) -> None:
        self.destroyed.append(name)
        raise ServerError("gone", retry=True)


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    monkeypatch.setattr(distributed_transport, "UpdateGroup", Group)
    Group.made = []
    return Group.made


def update(transport: DistributedTransport, **info: Any) -> None:
    """An update that succeeds, of a server that reports `info`."""
    [bucket] = buckets([("a", torch.ones(3))], 64)

    async def run() -> None:
        await transport.open(SERVER, replace(INFO, **info), 5.0)
        await transport.send(SERVER, bucket, 5.0)

    asyncio.run(run())
    transport.completed(SERVER, "r:1")


def test_a_group_is_kept_while_the_server_is_unchanged(groups: list[Group]) -> None:
    transport = DistributedTransport(Endpoints())  # type: ignore[arg-type]
    update(transport, tp_size=4)
    update(transport, weight_version="r:1")
    [group] = groups
    assert group.size == 5 and group.broadcasts == 2 and not group.dropped
    transport.close()
    assert group.dropped


@pytest.mark.parametrize("changed", [{"start_id": "2", "weight_version": "r:1"}, {"weight_version": "r:0"}])
def test_a_server_that_restarted_or_missed_an_update_gets_a_new_group(groups: list[Group], changed: Any) -> None:
    endpoints = Endpoints()
    transport = DistributedTransport(endpoints)  # type: ignore[arg-type]
    update(transport)
    update(transport, **changed)
    assert len(groups) == 2 and groups[0].dropped and endpoints.destroyed == [groups[0].name]
    assert groups[0].name != groups[1].name


def test_a_broadcast_that_fails_names_server_and_path(groups: list[Group]) -> None:
    transport = DistributedTransport(Endpoints())  # type: ignore[arg-type]
    update(transport)
    groups[0].failure = GroupError("the broadcast broke: reset")
    with pytest.raises(ServerError, match=f"^server {INFO.url}/broadcast: the broadcast broke: reset$"):
        update(transport, weight_version="r:1")


def test_an_address_of_another_machine() -> None:
    transport = DistributedTransport(Endpoints(), address="192.0.2.1")  # type: ignore[arg-type]
    with pytest.raises(ServerError, match=f"^server {INFO.url}/init: cannot listen there$") as caught:
        update(transport)
    assert not caught.value.retry
