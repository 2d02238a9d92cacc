"""Write a safetensors file in pieces, from several processes: the safetensors library only writes
whole files.

The format: 8 bytes with the length of the header, a JSON header with sizes and offsets, the bytes
of the tensors. The order is the library's (by size of the type, then by name), so that the same
tensors give the same bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.errors import writing

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class FileLayout:
    """header: the first bytes of the file.

    offsets: name -> position of its bytes in the file. size: of the file.
    """

    header: bytes
    offsets: dict[str, int]
    size: int


def file_layout(
    tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> FileLayout:
    """The layout of a file that holds tensors of these sizes and types, by name."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-dtypes[name].itemsize, name)):
        size = math.prod(tensors[name]) * dtypes[name].itemsize
        entries[name] = {
            "dtype": _NAMES[dtypes[name]],
            "shape": list(tensors[name]),
            "data_offsets": [position, position + size],
        }
        starts[name] = position
        position += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(
        header,
        {name: len(header) + start for name, start in starts.items()},
        len(header) + position,
    )


def begin_file(path: Path, layout: FileLayout) -> None:
    """Create the file in its full size, with its header.

    Raises ``DiskError`` if the disk is full.
    """
    with writing(path, needed=layout.size), path.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, layout.size)
        stream.write(layout.header)
        stream.flush()
        os.fsync(stream.fileno())


def is_begun(path: Path, layout: FileLayout) -> bool:
    """Whether `begin_file` completed: a kill or a power failure can leave the full size without
    a header.
    """
    if not path.is_file() or path.stat().st_size != layout.size:
        return False
    with path.open("rb") as stream:
        return stream.read(len(layout.header)) == layout.header


def write_tensors(path: Path, tensors: Iterable[tuple[int, Tensor]]) -> None:
    """Write tensors at their offsets into a file of `begin_file` and flush it to disk."""
    with writing(path), path.open("r+b", buffering=0) as stream:
        for offset, tensor in tensors:
            data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data
            while data:
                written = os.pwrite(stream.fileno(), data, offset)
                data = data[written:]
                offset = offset + written
        os.fsync(stream.fileno())
