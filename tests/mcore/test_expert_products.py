"""Experts' weights as one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.expert_products import stacked

BUFFER = torch.arange(96.0)


def at(*offsets: int) -> list[Tensor]:
    return [BUFFER[offset : offset + 16].view(2, 8) for offset in offsets]


def is_view_of_buffer(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == BUFFER.untyped_storage().data_ptr()


@pytest.mark.parametrize("offsets", [(0, 32, 64), (0, 16, 32), (8, 48)])
def test_tensors_at_equal_distances_are_a_view(offsets):
    joined = stacked(at(*offsets))
    assert is_view_of_buffer(joined)
    assert torch.equal(joined, torch.stack(at(*offsets)))


COPIED = {
    "backward": at(64, 32, 0),
    "unequal distances": at(0, 16, 64),
    "overlapping": at(0, 8, 16),
    "not aligned": at(4, 24, 44),
    "transposed": [tensor.t() for tensor in at(0, 32, 64)],
    "other memory": [tensor.clone() for tensor in at(0, 32, 64)],
    "one expert": at(0),
}


@pytest.mark.parametrize("tensors", COPIED.values(), ids=COPIED)
def test_other_tensors_are_copied(tensors):
    joined = stacked(tensors)
    assert not is_view_of_buffer(joined)
    assert torch.equal(joined, torch.stack(tensors))
