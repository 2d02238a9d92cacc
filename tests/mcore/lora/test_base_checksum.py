"""The sum sees every element's bits and place, and parts add up to the whole."""

from __future__ import annotations

import torch

from megatron_gspo.mcore.lora.base_checksum import _sum


def places(rows: int, columns: int) -> list[torch.Tensor]:
    return [torch.arange(rows), torch.arange(columns)]


def test_one_bit_and_one_exchange_show():
    weight = torch.arange(12.0).view(3, 4)
    whole = _sum(weight, places(3, 4))
    changed = weight.clone()
    changed.view(torch.int32)[1, 2] ^= 1
    exchanged = [
        weight.roll(1, 0),
        weight.roll(1, 1),
        torch.cat([weight[:, :2], weight[:, [3, 2]]], dim=1),
    ]
    for other in (changed, *exchanged):
        assert _sum(other, places(3, 4)) != whole
    assert _sum(weight.bfloat16(), places(3, 4)) != whole
