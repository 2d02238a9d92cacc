"""Safetensors files written in pieces: the library's bytes, in any order, and an incomplete start is detected."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.tools.convert.safetensors_pieces import begin_file, file_layout, is_begun, write_tensors

SIZES = {"b.weight": (3, 5), "a.weight": (4,), "ä": (2, 1, 2), "empty": (0, 7)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bytes_are_the_librarys(dtype, tmp_path):
    tensors = {name: torch.randn(size).to(dtype) for name, size in SIZES.items()}
    layout = file_layout(SIZES, dict.fromkeys(SIZES, dtype))
    begin_file(tmp_path / "pieces", layout)
    for name in reversed(list(tensors)):  # each as a process of its own would
        write_tensors(tmp_path / "pieces", [(layout.offsets[name], tensors[name])])
    save_file(tensors, tmp_path / "whole", metadata={"format": "pt"})
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
    assert all(torch.equal(load_file(tmp_path / "pieces")[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_is_not_contiguous(tmp_path):
    layout = file_layout({"x": (3, 2)}, {"x": torch.float32})
    begin_file(tmp_path / "f", layout)
    value = torch.arange(6.0).view(2, 3).T
    write_tensors(tmp_path / "f", [(layout.offsets["x"], value)])
    assert torch.equal(load_file(tmp_path / "f")["x"], value)


def test_only_a_complete_header_is_begun(tmp_path):
    layout, file = file_layout(SIZES, dict.fromkeys(SIZES, torch.float32)), tmp_path / "f"
    assert not is_begun(file, layout)
    file.write_bytes(bytes(layout.size))  # full size, no header
    assert not is_begun(file, layout)
    begin_file(file, layout)
    assert is_begun(file, layout)
    file.write_bytes(layout.header)  # header, not the size
    assert not is_begun(file, layout)


def test_headers_are_aligned():
    for names in (["a"], ["ab"], ["abc", "d"]):
        assert len(file_layout({name: (1,) for name in names}, dict.fromkeys(names, torch.float32)).header) % 8 == 0
