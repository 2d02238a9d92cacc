"""The index of a checkpoint: torch reads it, and gaps, overlaps and foreign classes are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_gspo.mcore.checkpoint.metadata_file import (
    METADATA,
    StoredPart,
    read_index,
    read_metadata,
    stored_parts,
    write_index,
    write_metadata_file,
)
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box
from megatron_gspo.models.model_shape import ModelError

FIRST = StoredPart("weight", "__0_0.distcp", 64, 100, Box((0, 0), (1, 4)), (3, 4), torch.bfloat16)
SECOND = StoredPart("weight", "__1_0.distcp", 0, 200, Box((1, 0), (2, 4)), (3, 4), torch.bfloat16)
OBJECT = StoredPart("extra/shard_0_1", "__1_0.distcp", 300, 7)


def test_ranks_indices_become_torchs_metadata(tmp_path):
    write_index(tmp_path, 0, [FIRST])
    write_index(tmp_path, 1, [SECOND, OBJECT])
    parts = [*read_index(tmp_path, 0), *read_index(tmp_path, 1)]
    assert parts == [FIRST, SECOND, OBJECT] and list(tmp_path.iterdir()) == []
    write_metadata_file(tmp_path, parts)
    entry = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["weight"]
    assert (
        tuple(entry.size) == (3, 4)
        and entry.properties.dtype == torch.bfloat16
        and len(entry.chunks) == 2
    )
    stored = stored_parts(read_metadata(tmp_path / METADATA))
    assert stored == {
        "weight": [replace(part, dtype=None) for part in (FIRST, SECOND)],
        "extra/shard_0_1": [OBJECT],
    }


def test_a_shard_that_is_missing_or_written_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weight: 4 elements are written of \[3, 4\]"):
        write_metadata_file(tmp_path, [FIRST])
    with pytest.raises(ValueError, match=r"two ranks wrote weight at \(0, 0\)"):
        write_metadata_file(tmp_path, [FIRST, SECOND, replace(FIRST, file="__2_0.distcp")])
    with pytest.raises(ValueError, match="weight: 16 elements"):
        write_metadata_file(tmp_path, [FIRST, SECOND, replace(FIRST, box=Box((2, 0), (1, 4)))])
    with pytest.raises(ValueError, match="weight: 12 elements"):
        write_metadata_file(tmp_path, [FIRST, replace(SECOND, dtype=torch.float32)])
    assert not (tmp_path / METADATA).exists()


class Harm:
    def __reduce__(self):
        return print, ("harm",)


def test_other_classes_are_not_unpickled(tmp_path, capsys):
    file = tmp_path / METADATA
    file.write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ModelError, match=r"it names builtins\.print, which no checkpoint needs"):
        read_metadata(file)
    assert capsys.readouterr().out == ""
    file.write_bytes(pickle.dumps(torch.Size((1,))))
    with pytest.raises(ModelError, match="not a checkpoint's metadata, but a Size"):
        read_metadata(file)
