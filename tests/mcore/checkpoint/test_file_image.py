"""A rank's file in memory: what is copied, written and found again; a job that fails."""

from __future__ import annotations

import io
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.checkpoint import file_image
from megatron_gspo.mcore.checkpoint.file_image import FileImage
from megatron_gspo.mcore.checkpoint.metadata_file import StoredPart
from megatron_gspo.mcore.checkpoint.pieces import Piece
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box
from megatron_gspo.mcore.offload import PAGE

WEIGHTS = torch.arange(24.0)
MOMENTS = torch.arange(7.0)


def piece(key: str, values: Tensor, sizes: tuple[int, ...]) -> Piece:
    return Piece(key, sizes, Box((0,) * len(sizes), sizes), values, False)


def pieces() -> list[Piece]:
    return [
        piece("weight", WEIGHTS, (4, 6)),
        piece("half", WEIGHTS[:3].to(torch.bfloat16), (3,)),
        piece("optimizer.state.param.weight", WEIGHTS.view(-1), (4, 6)),  # the same memory
        piece("optimizer.state.exp_avg.weight", MOMENTS, (7,)),
    ]


def stored(folder: Path, part: StoredPart) -> bytes:
    return (folder / part.file).read_bytes()[part.start : part.start + part.length]


def loaded(folder: Path, image: FileImage) -> dict[str, Tensor]:
    parts = [part for part in image.parts if part.box is not None]
    return {
        part.key: torch.load(io.BytesIO(stored(folder, part)), weights_only=True) for part in parts
    }


@pytest.mark.parametrize("block", [PAGE, 16 << 20])
def test_the_file_holds_what_was_there_when_it_was_copied(tmp_path, monkeypatch, block):
    """Also where values lie across blocks; a second copy takes the same memory."""
    monkeypatch.setattr(file_image, "_BLOCK", block)
    values = torch.arange(3000.0)
    image = FileImage(
        "file", [*pieces(), piece("long", values, (3000,))], {"a": b"one", "b": b"one", "c": b"two"}
    )
    for number in range(2):
        values.fill_(number)
        image.copy()
        values.fill_(9)
        folder = tmp_path / str(number)
        folder.mkdir()
        image.write(folder, lambda: False)
        tensors = loaded(folder, image)
        assert torch.equal(tensors["weight"], WEIGHTS.view(4, 6))
        assert torch.equal(tensors["long"], torch.full((3000,), float(number)))
        assert torch.equal(tensors["optimizer.state.param.weight"], tensors["weight"])
        assert torch.equal(tensors["half"], WEIGHTS[:3].to(torch.bfloat16))
        assert (folder / "file").stat().st_size == image.nbytes and image.nbytes % PAGE == 0
        objects = {part.key: stored(folder, part) for part in image.parts if part.box is None}
        assert objects == {"a": b"one", "b": b"one", "c": b"two"}


def test_the_same_memory_is_stored_once():
    by_key = {part.key: (part.start, part.length) for part in FileImage("file", pieces(), {}).parts}
    assert (
        by_key["weight"]
        == by_key["optimizer.state.param.weight"]
        != by_key["optimizer.state.exp_avg.weight"]
    )


def test_a_save_that_is_stopped_writes_no_more(tmp_path):
    image = FileImage("file", pieces(), {})
    image.write(tmp_path, lambda: True)
    assert (tmp_path / "file").stat().st_size == 0


@pytest.mark.parametrize("size", [5000, PAGE])
def test_a_full_disk_is_an_error(tmp_path, size):
    image = FileImage("file", [piece("long", torch.arange(9000.0), (9000,))], {})
    image.copy()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            image.write(tmp_path, lambda: False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_system_without_direct_writes(tmp_path):
    """Memory file systems refuse them, some when the file is opened."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm")
    image = FileImage(f"file_{os.getpid()}", pieces(), {})
    image.copy()
    try:
        image.write(folder, lambda: False)
        assert (folder / image.name).stat().st_size == image.nbytes
    finally:
        (folder / image.name).unlink()
