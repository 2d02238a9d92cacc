"""Requests to our receiver, and which tensors are sent.

Transfers: tests/rollout/test_weight_sync.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_gspo.servers.http_client import EventLoop
from megatron_gspo.weight_transport.receiver_transport import ReceiverTransport
from megatron_gspo.weight_transport.transport import Sent
from tests.support.weight_updates import HarmedWeights

NONE: Any = None


def test_only_tensors_whose_bytes_differ_are_selected() -> None:
    stream = [
        ("a", torch.arange(3.0)),
        ("b", torch.ones(2, 2).t()),
        ("c", torch.tensor([0.0, -0.0])),
    ]
    plain = ReceiverTransport(NONE)
    sparse = ReceiverTransport(NONE, changes_only=True)
    assert [name for name, _ in plain.select(iter(stream))] == ["a", "b", "c"] and plain._sums == {}
    assert [name for name, _ in sparse.select(iter(stream))] == ["a", "b", "c"]
    sparse._known = sparse._sums
    sparse._sums = {}
    stream[2] = ("c", torch.tensor([-0.0, 0.0]))  # equal numbers, other bytes
    assert [name for name, _ in sparse.select(iter(stream))] == ["c"]
    assert sparse._sums.keys() == {"a", "b", "c"}


class BrokenTransport(ReceiverTransport):
    """Its servers have failed when the first bucket is there."""

    async def open(self, targets: object, timeout: float) -> None:
        pass

    async def finish(self, timeout: float) -> Sent:
        return Sent()


@pytest.mark.parametrize("checksums", [False, True])
def test_the_stream_of_a_broken_transfer_is_read_to_its_end(checksums: bool) -> None:
    """Producing it may be collective: the other ranks would wait for this one."""
    tensors = [(name, torch.ones(4)) for name in "abc"]
    weights = HarmedWeights(lambda: iter(tensors), harm=lambda: None)
    loop = EventLoop()
    transport = BrokenTransport(NONE, checksums=checksums)
    assert transport.is_over
    transport.transfer(loop, {}, weights, bucket_bytes=16 * transport.in_flight, timeout=60)
    loop.close()
    assert weights.all_read
