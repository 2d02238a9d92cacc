"""Regions of stored tensors, read into other regions, against the whole tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.checkpoint import read_pieces as module
from megatron_gspo.mcore.checkpoint.file_image import FileImage
from megatron_gspo.mcore.checkpoint.metadata_file import write_metadata_file
from megatron_gspo.mcore.checkpoint.pieces import Piece
from megatron_gspo.mcore.checkpoint.read_pieces import MismatchError, read_pieces
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box, boxes_of_range

SHAPE = (4, 6, 5)
WHOLE = torch.arange(120.0).view(SHAPE)


def part_of(box: Box) -> Tensor:
    return WHOLE[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]


def save(folder: Path, boxes: list[list[Box]], key: str = "weight") -> None:
    """A checkpoint with a file for each list of boxes."""
    parts = []
    for rank, own_boxes in enumerate(boxes):
        pieces = [
            Piece(key, SHAPE, box, part_of(box).reshape(-1).clone(), False) for box in own_boxes
        ]
        image = FileImage(f"__{rank}_0.distcp", pieces, {})
        image.copy()
        image.write(folder, lambda: False)
        parts += image.parts
    write_metadata_file(folder, parts)


def wanted(
    box: Box, key: str = "weight", whole: tuple[int, ...] = SHAPE, is_padded: bool = False
) -> Piece:
    return Piece(key, whole, box, torch.full((box.numel,), -1.0), is_padded)


BY_RANGE = [list(boxes_of_range(SHAPE, 0, 37)), list(boxes_of_range(SHAPE, 37, 120))]
BY_COLUMN = [[Box((0, 0, 0), (4, 6, 3))], [Box((0, 0, 3), (4, 6, 2))]]
BY_ROW = [[Box((row, 0, 0), (1, 6, 5))] for row in range(4)]
ODD = [
    Box((0, 0, 0), SHAPE),
    Box((1, 2, 3), (2, 3, 2)),
    Box((3, 0, 0), (1, 1, 5)),
    Box((0, 5, 4), (4, 1, 1)),
]


@pytest.mark.parametrize("buffer", [20, 64, 1 << 20])
@pytest.mark.parametrize("stored", [BY_RANGE, BY_COLUMN, BY_ROW], ids=["range", "column", "row"])
def test_any_region_from_any_layout(tmp_path, monkeypatch, stored, buffer):
    monkeypatch.setattr(module, "_BUFFER", buffer)
    save(tmp_path, stored)
    pieces = [wanted(box) for box in (*ODD, *boxes_of_range(SHAPE, 11, 76))]
    read_pieces(tmp_path, pieces)
    for piece in pieces:
        assert torch.equal(piece.values.view(piece.box.sizes), part_of(piece.box)), piece.box


def test_a_padded_tensor_is_filled_with_zeros(tmp_path):
    """A vocabulary of another size: rows that the checkpoint doesn't have are 0, those that it
    has more are left.
    """
    save(tmp_path, BY_RANGE)
    longer = wanted(Box((2, 0, 0), (4, 6, 5)), whole=(6, 6, 5), is_padded=True)
    shorter = wanted(Box((1, 0, 0), (2, 6, 5)), whole=(3, 6, 5), is_padded=True)
    beyond = wanted(Box((4, 0, 0), (2, 6, 5)), whole=(6, 6, 5), is_padded=True)
    read_pieces(tmp_path, [longer, shorter, beyond])
    assert torch.equal(longer.values.view(4, 6, 5), torch.cat([WHOLE[2:], torch.zeros(2, 6, 5)]))
    assert torch.equal(shorter.values.view(2, 6, 5), WHOLE[1:3]) and not beyond.values.any()


def test_another_model_is_named(tmp_path):
    save(tmp_path, BY_ROW)
    with pytest.raises(MismatchError, match="^it has no bias$"):
        read_pieces(tmp_path, [wanted(ODD[0], key="bias")])
    with pytest.raises(
        MismatchError, match=r"^weight is \[4, 6, 5\] there and \[5, 6, 5\] in the model$"
    ):
        read_pieces(tmp_path, [wanted(ODD[0], whole=(5, 6, 5))])
    with pytest.raises(MismatchError, match=r"\[4, 6, 5\] there and \[4, 6, 6\]"):
        read_pieces(tmp_path, [wanted(ODD[0], whole=(4, 6, 6), is_padded=True)])


def test_one_memory_is_read_from_the_main_weights(tmp_path):
    """In float32 they are a view of the model's, which a checkpoint in bfloat16 has rounded."""
    exact = torch.linspace(0, 1, 6)
    box = Box((0,), (6,))
    stored = {"weight": exact.to(torch.bfloat16), "optimizer.state.param.weight": exact}
    image = FileImage(
        "__0_0.distcp", [Piece(key, (6,), box, value, False) for key, value in stored.items()], {}
    )
    image.copy()
    image.write(tmp_path, lambda: False)
    write_metadata_file(tmp_path, image.parts)
    for keys in (list(stored), ["weight"], ["weight", "optimizer.state.param.other"]):
        target = torch.empty(6)
        read_pieces(tmp_path, [Piece(key, (6,), box, target, False) for key in keys])
        assert torch.equal(target, stored[keys[-1] if keys[-1] in stored else "weight"].float())
