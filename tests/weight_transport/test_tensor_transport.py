"""Weights in requests: one payload per tensor-parallel rank, by value or by handle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from megatron_gspo.weight_transport.buckets import Bucket, buckets
from megatron_gspo.weight_transport.tensor_transport import SharedMemoryTransport, TensorTransport
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport
from tests.weight_transport.test_weight_update import INFO


class Endpoints:
    """Keeps the payloads."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    async def load_payloads(self, server: Any, payloads: Sequence[Any], *, timeout: float) -> None:
        self.sent.append([b"".join(payload) for payload in payloads])


def send(transport: WeightTransport, tp_size: int) -> Bucket:
    """One bucket to a server with so many ranks."""
    server: Any = SimpleNamespace(url=INFO.url)
    stream = [("a", torch.arange(3.0)), ("b", torch.ones(2))]
    [bucket] = buckets(stream, 64, device=transport.device, allocate=transport.allocate)

    async def run() -> None:
        await transport.open({INFO.url: Target(server, replace(INFO, tp_size=tp_size))}, 5.0)
        await transport.send(bucket, 5.0)
        assert await transport.finish(5.0) == Sent()

    asyncio.run(run())
    return bucket


def test_by_value_every_rank_gets_the_bytes() -> None:
    endpoints = Endpoints()
    bucket = send(TensorTransport(endpoints), tp_size=3)  # type: ignore[arg-type]
    [payloads] = endpoints.sent
    assert len(payloads) == 3 and len(set(payloads)) == 1
    assert bucket.data.numpy().tobytes() in payloads[0]


def test_by_handle_the_bytes_stay_and_every_rank_gets_one() -> None:
    endpoints = Endpoints()
    bucket = send(SharedMemoryTransport(endpoints), tp_size=2)  # type: ignore[arg-type]
    [payloads] = endpoints.sent
    assert len(payloads) == 2 and bucket.data.is_shared()
    assert bucket.data.numpy().tobytes() not in payloads[0]


def test_by_handle_a_server_on_another_machine_fails() -> None:
    transport, far = SharedMemoryTransport(Endpoints()), replace(INFO, url="http://192.0.2.1:30000")  # type: ignore[arg-type]
    targets = {info.url: Target(SimpleNamespace(), info) for info in (INFO, far)}  # type: ignore[arg-type]

    async def run() -> Sent:
        await transport.open(targets, 5.0)
        return await transport.finish(5.0)

    [(url, error)] = asyncio.run(run()).failures.items()
    assert url == far.url and f"server {url}: is on another machine" in str(error)
    assert list(transport.targets) == [INFO.url]
