"""What every weight transport has from its base class."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.disk_transport import DiskTransport
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.tensor_transport import SharedMemoryTransport, TensorTransport
from megatron_gspo.weight_transport.transport import WeightTransport
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
    transport.begin("v:1")
    transport.take(bucket)
    transport.end()
    for step in (transport.open(NONE, INFO, 1.0), transport.send(NONE, bucket, 1.0), transport.finish(NONE, 1.0)):
        assert asyncio.run(step) is None  # type: ignore[func-returns-value]
    asyncio.run(transport.abandon(NONE, 1.0))
    transport.completed(NONE, "v:1")
    transport.close()
    transport.close()


@pytest.mark.parametrize(
    ("kind", "stores", "needs_session", "device"),
    [(DiskTransport, True, False, "cpu"), (TensorTransport, False, True, "cpu"),
     (DistributedTransport, False, True, "cpu"), (SharedMemoryTransport, False, True, None)],
)  # fmt: skip
def test_when_servers_pause_and_where_the_buffer_is(kind, stores, needs_session, device):
    assert (kind.stores, kind.needs_session) == (stores, needs_session)
    assert kind.device == (None if device is None else torch.device(device))
    assert (kind.allocate is None) == (kind is not SharedMemoryTransport)
