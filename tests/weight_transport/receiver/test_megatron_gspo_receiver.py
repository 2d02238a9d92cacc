"""The checksum of a tensor, and requests that end without weights;
tests/rollout/test_weight_sync.py has transfers."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_gspo.weight_transport.receiver import megatron_gspo_receiver
from megatron_gspo.weight_transport.receiver.megatron_gspo_receiver import checksum, load


def naive(data: bytes) -> int:
    total = len(data)
    for position in range(len(data) // 8 + 1):
        word = int.from_bytes(data[position * 8 : position * 8 + 8].ljust(8, b"\0"), "little")
        word = (word ^ word >> 32) * 0x9E3779B97F4A7C15 % 2**64
        word ^= word >> 29
        total += word * (1 if position == len(data) // 8 else 2 * position + 3)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1000])
def test_the_sum_is_that_of_a_loop_wherever_the_bytes_lie(size, monkeypatch):
    monkeypatch.setattr(megatron_gspo_receiver, "_CHUNK", 5)
    whole = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)
    for first in range(4):
        data = whole[first : first + size]
        assert checksum(data) == naive(bytes(data.tolist()))


def test_every_bit_counts():
    data = torch.randint(0, 256, (45,), dtype=torch.uint8)
    sums = {checksum(data)}
    for byte in range(45):
        for bit in (1, 128):
            other = data.clone()
            other[byte] ^= bit
            sums.add(checksum(other))
    assert len(sums) == 91
    signs = torch.randn(100)
    changed = signs.clone()
    changed[[3, 50]] *= -1
    assert checksum(signs.view(torch.uint8)) != checksum(changed.view(torch.uint8))
    assert checksum(torch.zeros(8, dtype=torch.uint8)) != checksum(
        torch.zeros(16, dtype=torch.uint8)
    )


def test_a_request_that_cannot_be_met_ends_and_raises_nothing():
    source = {"name": "w", "address": "127.0.0.1", "port": 1, "size": 2, "backend": "gloo"}
    request = {"rank": 1, "transfer": "t", "timeout": 1.0, "checksums": False, "sources": [source]}
    for text in (json.dumps(request), "not JSON"):
        load(None, [("request", torch.tensor(list(text.encode()), dtype=torch.uint8))])
    assert megatron_gspo_receiver._groups == {}
