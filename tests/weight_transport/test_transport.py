"""What every weight transport has from its base class."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.disk_transport import DiskTransport
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.tensor_transport import SharedMemoryTransport, TensorTransport
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport
from tests.weight_transport.test_weight_update import INFO

NONE: Any = None


def test_data_parallel_servers_take_weights_from_files_only():
    transport = WeightTransport(NONE)
    assert transport.unsupported(INFO) == ""
    refusal = transport.unsupported(replace(INFO, dp_size=4))
    assert refusal.startswith("has dp_size 4") and refusal.endswith("or use weight_transport=disk")


def test_the_steps_do_nothing_unless_they_are_defined():
    transport = WeightTransport(NONE)
    [bucket] = buckets([("a", torch.ones(2))], 8)
    transport.prepare("v:1")
    transport.begin("v:1", 0)
    transport.take(bucket)
    transport.publish(1)
    steps = (
        transport.open({}, 1.0),
        transport.send(bucket, 1.0),
        transport.flush(1.0),
        transport.abort(),
        transport.load(NONE, 1.0),
    )
    for step in steps:
        assert asyncio.run(step) is None  # type: ignore[func-returns-value]
    assert asyncio.run(transport.finish(1.0)) == Sent() and transport.is_over
    transport.close()
    transport.close()


def test_a_server_that_fails_gets_no_further_steps():
    transport, seen = WeightTransport(NONE), []
    targets = {url: Target(NONE, replace(INFO, url=url)) for url in ("http://a:1", "http://b:1")}

    async def step(target: Target) -> None:
        seen.append(target.info.url)
        if target.info.url == "http://a:1":
            raise ServerError("refused", status=400, retry=False)

    async def run() -> None:
        await transport.open(targets, 1.0)
        await transport.on_each(step)
        await transport.on_each(step)

    asyncio.run(run())
    assert seen == ["http://a:1", "http://b:1", "http://b:1"] and not transport.is_over
    assert {url: str(error) for url, error in transport.failures.items()} == {
        "http://a:1": "refused"
    }


@pytest.mark.parametrize(
    ("kind", "stores", "needs_session", "device"),
    [
        (DiskTransport, True, False, "cpu"),
        (TensorTransport, False, True, "cpu"),
        (DistributedTransport, False, True, "cpu"),
        (SharedMemoryTransport, False, True, None),
    ],
)
def test_when_servers_pause_and_where_the_buffer_is(kind, stores, needs_session, device):
    assert (kind.stores, kind.needs_session) == (stores, needs_session)
    assert kind.device == (None if device is None else torch.device(device))
    assert (kind.allocate is None) == (kind is not SharedMemoryTransport)
