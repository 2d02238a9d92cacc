"""Checkpoint files in torch.distributed.checkpoint's format: regions across chunks, gaps,
unsafe pickles.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_gspo.models.families import FAMILIES
from megatron_gspo.models.model_shape import ModelError
from megatron_gspo.models.parameter_slices import CheckpointChunk, ParameterSlice
from megatron_gspo.tools.convert.torch_dcp_files import (
    DistributedReader,
    write_file,
    write_metadata,
)

VALUE = torch.arange(40.0).view(10, 4)
PART = ParameterSlice(FAMILIES["qwen3"].outer[0], -1, 0, (10, 4))
WHOLE = CheckpointChunk("weight", (10, 4), (0, 0), (10, 4), PART, (4, 1), 0)


def write(folder: Path, objects: dict[str, bytes] | None = None) -> Path:
    """VALUE in pieces of 3 rows, two pieces a file."""
    folder.mkdir()
    pieces = list(WHOLE.pieces(12))
    placements = []
    for number, run in enumerate((pieces[:2], pieces[2:])):
        made = write_file(
            folder,
            number,
            run,
            lambda chunk: chunk.view_in(VALUE),
            torch.float32,
            {} if number else objects,
        )
        placements += made
    write_metadata(folder, pieces, torch.float32, objects or {}, placements)
    return folder


def test_any_region_is_read_whatever_chunks_it_was_written_in(tmp_path):
    reader = DistributedReader(write(tmp_path / "checkpoint"))
    assert reader.tensors == {"weight": (10, 4)} and reader.dtype("weight") is torch.float32
    target = torch.full((10, 4), -1.0)
    region = CheckpointChunk("weight", (10, 4), (2, 0), (5, 4), PART, (4, 1), 8)
    reader.read_into(target, region)
    assert torch.equal(target[2:7], VALUE[2:7])
    assert (target[:2] == -1).all() and (target[7:] == -1).all()


def test_what_was_never_written_or_leaves_a_gap_is_an_error(tmp_path):
    pieces = list(WHOLE.pieces(12))
    placements = write_file(
        tmp_path, 0, pieces[:2], lambda chunk: chunk.view_in(VALUE), torch.float32
    )
    with pytest.raises(ValueError, match="2 chunks were never written, weight first"):
        write_metadata(tmp_path, pieces, torch.float32, {}, placements)
    with pytest.raises(ValueError, match="the chunks of weight leave a gap or overlap"):
        write_metadata(tmp_path, pieces[:2], torch.float32, {}, placements)


def test_a_chunk_outside_of_what_is_stored_is_a_gap(tmp_path):
    reader = DistributedReader(write(tmp_path / "checkpoint"))
    larger = replace(WHOLE, sizes=(11, 4), part=replace(PART, sizes=(11, 4)))
    with pytest.raises(ModelError, match="the chunks of weight leave a gap"):
        reader.read_into(torch.zeros(11, 4), larger)
