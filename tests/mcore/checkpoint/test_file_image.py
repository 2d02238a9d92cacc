"""A rank's file on a file system that refuses direct writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gspo.mcore.checkpoint.file_image import FileImage
from megatron_gspo.mcore.checkpoint.pieces import Piece
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box

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
