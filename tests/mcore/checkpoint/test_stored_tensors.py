"""Tensors in torch.save's format: a view is described as it is, and nothing else is unpickled."""

from __future__ import annotations

import io
import os
import pickle
import zipfile

import pytest
import torch

from megatron_gspo.mcore.checkpoint.stored_tensors import frame, read_header


def values_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel()).view(sizes).to(dtype)


def framed(tensor: torch.Tensor) -> bytes:
    head, tail = frame(tensor.dtype, tuple(tensor.shape))
    return head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + tail


def header_of(tmp_path, content: bytes):
    """Of a tensor in the middle of a file."""
    path = tmp_path / "file"
    path.write_bytes(b"before" + content + b"after")
    file = os.open(path, os.O_RDONLY)
    try:
        return read_header(file, len(b"before"), len(content)), path.read_bytes()
    finally:
        os.close(file)


def test_a_view_is_described_as_it_is(tmp_path):
    stream = io.BytesIO()
    torch.save(values_of(torch.float32, (3, 7)).t()[2:], stream)
    header, _ = header_of(tmp_path, stream.getvalue())
    assert (header.numel, header.offset, header.sizes, header.strides) == (21, 2, (5, 3), (1, 7))


class Harm:
    def __reduce__(self):
        return os.system, ("false",)


def test_nothing_else_is_unpickled(tmp_path):
    stream = io.BytesIO()
    torch.save([Harm()], stream)
    with pytest.raises(
        pickle.UnpicklingError, match=r"it names (posix|os)\.system, which no tensor needs"
    ):
        header_of(tmp_path, stream.getvalue())
    with pytest.raises(zipfile.BadZipFile):
        header_of(tmp_path, bytes(500))
    half = framed(values_of(torch.float32, (3, 7)))[:-40]
    with pytest.raises(zipfile.BadZipFile):
        header_of(tmp_path, half)
