"""The comparison of two checkpoints, bit by bit, and checksums."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.models.hf_checkpoint import SINGLE
from megatron_gspo.models.model_shape import ModelError
from megatron_gspo.tools.convert.verify import verify

NORM = "model.norm.weight"


def changed(converted, folder, value: float):
    """A copy of the Hugging Face directory with another value in one element."""
    shutil.copytree(converted.hugging_face, folder)
    tensors = load_file(folder / SINGLE)
    tensors[NORM][3] = value
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def compare(converted, hugging_face=None, dtype=torch.float32, **options) -> int:
    return verify(
        hugging_face or converted.hugging_face,
        converted.megatron,
        converted.metadata.chunks,
        dtype=dtype,
        **options,
    )


def test_one_bit_is_a_difference_that_names_the_tensor(converted, tmp_path):
    value = float(load_file(converted.hugging_face / SINGLE)[NORM][3])
    nearest = float(torch.nextafter(torch.tensor(value), torch.tensor(torch.inf)))
    other = changed(converted, tmp_path / "other", nearest)
    with pytest.raises(ModelError, match=f"{NORM} differs between"):
        compare(converted, other)
    assert compare(converted, other, torch.bfloat16) > 0, (
        "both are compared in the converted one's type"
    )
