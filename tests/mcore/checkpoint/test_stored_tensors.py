"""Tensors in torch.save's format: torch reads what is framed, and the values are found in what
torch wrote.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile

import pytest
import torch

from megatron_gspo.mcore.checkpoint.stored_tensors import ALIGNMENT, frame, read_header

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
SIZES = ((5,), (3, 7), (1, 2, 3), (1, 1, 1))


def values_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel()).view(sizes).to(dtype)


def framed(tensor: torch.Tensor) -> bytes:
    head, tail = frame(tensor.dtype, tuple(tensor.shape))
    return head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + tail


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_torch_loads_what_is_framed(dtype, sizes):
    tensor = values_of(dtype, sizes)
    assert len(frame(dtype, sizes)[0]) % ALIGNMENT == 0
    loaded = torch.load(io.BytesIO(framed(tensor)), weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, tensor)


def header_of(tmp_path, content: bytes):
    """Of a tensor in the middle of a file."""
    path = tmp_path / "file"
    path.write_bytes(b"before" + content + b"after")
    file = os.open(path, os.O_RDONLY)
    try:
        return read_header(file, len(b"before"), len(content)), path.read_bytes()
    finally:
        os.close(file)


@pytest.mark.parametrize("written_by", ["torch", "frame"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_values_are_found(tmp_path, dtype, written_by):
    tensor = values_of(dtype, (3, 7))
    stream = io.BytesIO()
    torch.save(tensor, stream)
    header, content = header_of(
        tmp_path, stream.getvalue() if written_by == "torch" else framed(tensor)
    )
    assert (header.dtype, header.sizes, header.strides) == (dtype, (3, 7), (7, 1))
    assert (header.numel, header.offset) == (21, 0)
    values = torch.frombuffer(bytearray(content[header.start :]), dtype=dtype, count=21)
    assert torch.equal(values.view(3, 7), tensor)


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
