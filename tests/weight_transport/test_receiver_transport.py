"""Requests to our receiver, and which tensors are sent. Transfers: tests/rollout/test_weight_distribution.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_gspo.servers.http_client import EventLoop
from megatron_gspo.weight_transport.receiver_transport import Offer, ReceiverTransport, receive_requests
from megatron_gspo.weight_transport.transport import Sent
from megatron_gspo.weight_transport.weight_update import send_weights
from tests.support.weight_updates import HarmedWeights
from tests.weight_transport.test_weight_update import INFO

NONE: Any = None


def test_ranks_of_all_servers_are_numbered_in_one_group() -> None:
    infos = [replace(INFO, url="http://a:1", tp_size=2), replace(INFO, url="http://b:1")]
    offers = [Offer("w0", "10.0.0.1", 5, 4, "gloo"), Offer("w1", "10.0.0.2", 6, 4, "gloo")]
    requests = receive_requests(offers, "t", infos, timeout=3.0, checksums=True)
    assert {url: [each["rank"] for each in found] for url, found in requests.items()} == {
        "http://a:1": [1, 2], "http://b:1": [3]
    }  # fmt: skip
    one = requests["http://b:1"][0]
    assert one["transfer"] == "t" and one["timeout"] == 3.0 and one["checksums"]
    assert one["sources"] == [
        {"name": "w0", "address": "10.0.0.1", "port": 5, "size": 4, "backend": "gloo"},
        {"name": "w1", "address": "10.0.0.2", "port": 6, "size": 4, "backend": "gloo"},
    ]


def test_only_tensors_whose_bytes_differ_are_selected() -> None:
    stream = [("a", torch.arange(3.0)), ("b", torch.ones(2, 2).t()), ("c", torch.tensor([0.0, -0.0]))]
    plain, sparse = ReceiverTransport(NONE), ReceiverTransport(NONE, changes_only=True)
    assert [name for name, _ in plain.select(iter(stream))] == ["a", "b", "c"] and plain._sums == {}
    assert [name for name, _ in sparse.select(iter(stream))] == ["a", "b", "c"]
    sparse._known, sparse._sums = sparse._sums, {}
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
    weights, loop = HarmedWeights(lambda: iter(tensors), harm=lambda: None), EventLoop()
    transport = BrokenTransport(NONE, checksums=checksums)
    assert transport.is_over
    send_weights(loop, transport, {}, weights, bucket_bytes=16 * transport.in_flight, timeout=5.0)
    loop.close()
    assert weights.all_read
