"""Ranges of flattened tensors as boxes, against a tensor of numbered elements."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_gspo.mcore.checkpoint.tensor_boxes import Box, boxes_of_range


def region(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (2, 3, 4), (1, 1, 6), (3, 1, 2)])
def test_every_range_is_its_boxes_in_order(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            boxes = list(boxes_of_range(shape, start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
            found = [region(numbers, box).reshape(-1) for box in boxes]
            assert torch.equal(torch.cat([*found, numbers.new_empty(0)]), torch.arange(start, stop))
            assert [box.numel for box in boxes] == [len(part) for part in found]


def test_by_hand():
    """Of a [3, 4] tensor the elements 2 to 9: the rest of the first row, a whole row, one element."""
    assert list(boxes_of_range((3, 4), 2, 9)) == [Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 1))]
    assert list(boxes_of_range((3, 4), 5, 7)) == [Box((1, 1), (1, 2))]
    assert list(boxes_of_range((3, 4), 5, 5)) == []


def test_shared_region():
    assert Box((1, 2), (3, 4)).within(Box((0, 4), (2, 9))) == Box((1, 4), (1, 2))
    assert Box((1, 2), (3, 4)).within(Box((4, 2), (1, 4))) is None
    assert Box((1, 2), (3, 4)).moved((10, -2)) == Box((11, 0), (3, 4))
