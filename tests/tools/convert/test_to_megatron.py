"""Hugging Face to Megatron: type, pieces, companions, and what stops it before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_gspo.mcore.checkpoint.checkpoint_metadata import write_metadata_files
from megatron_gspo.tools.convert.to_megatron import to_megatron
from megatron_gspo.tools.convert.torch_dcp_files import DistributedReader
from megatron_gspo.tools.convert.work_units import Workers
from tests.tools.convert.conftest import Converted

EMBEDDING = "embedding.word_embeddings.weight"


def convert(converted: Converted, out: Path, chunks=None, **options) -> Path:
    metadata = converted.metadata
    return to_megatron(
        converted.hugging_face,
        out,
        metadata.chunks if chunks is None else chunks,
        metadata.objects,
        write_metadata_files,
        **options,
    )


def read(folder: Path, converted: Converted, key: str) -> torch.Tensor:
    reader = DistributedReader(folder)
    chunk = next(chunk for chunk in converted.metadata.chunks if chunk.key == key)
    value = torch.empty(chunk.part.sizes, dtype=reader.dtype(key))
    reader.read_into(value, chunk)
    return value


def test_every_unit_is_a_file_and_progress_ends_at_the_total(converted, tmp_path):
    reports: list[tuple[int, int]] = []
    out = convert(
        converted,
        tmp_path / "out",
        workers=Workers(unit_bytes=4000, report=lambda *at: reports.append(at)),
    )
    assert len(list(out.glob("*.distcp"))) == len(reports) > 3
    assert reports[-1][0] == reports[-1][1] and [done for done, _ in reports] == sorted(
        done for done, _ in reports
    )
    assert torch.equal(
        read(out, converted, EMBEDDING), read(converted.megatron, converted, EMBEDDING)
    )


def test_chunks_that_leave_a_gap_never_become_an_output(converted, tmp_path):
    rows = next(chunk for chunk in converted.metadata.chunks if chunk.key == EMBEDDING)
    pieces = list(rows.pieces(rows.numel // 2))
    others = [chunk for chunk in converted.metadata.chunks if chunk.key != EMBEDDING]
    with pytest.raises(ValueError, match=EMBEDDING):
        convert(converted, tmp_path / "out", [*others, pieces[0]])
    assert not (tmp_path / "out").exists()
