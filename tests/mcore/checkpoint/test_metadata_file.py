"""The index of a checkpoint: gaps, overlaps and foreign classes are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from megatron_gspo.mcore.checkpoint.metadata_file import (
    METADATA,
    StoredPart,
    read_metadata,
    write_metadata_file,
)
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box
from megatron_gspo.models.model_shape import ModelError

FIRST = StoredPart("weight", "__0_0.distcp", 64, 100, Box((0, 0), (1, 4)), (3, 4), torch.bfloat16)
SECOND = StoredPart("weight", "__1_0.distcp", 0, 200, Box((1, 0), (2, 4)), (3, 4), torch.bfloat16)


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
