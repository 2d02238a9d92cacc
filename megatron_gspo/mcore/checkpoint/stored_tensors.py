"""One tensor in a file as `torch.save` writes it, without its pickling and copying.

A stored tensor is a zip archive without compression: a pickle with dtype, sizes and strides, and
the values as they are in memory. `frame` is the archive around the values, so that they can be
copied to their place in a buffer and written from there. `read_header` finds the values in an
archive of anyone's, so that any part of them can be read.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

ALIGNMENT = 64  # bytes; of the values in a file
_DATE = 0x21  # 1980-01-01, the first that a zip archive can have
_STORAGES = torch.storage._dtype_to_storage_type_map()  # names of classes
_DTYPES = torch.storage._storage_type_to_dtype_map()


@lru_cache(maxsize=1024)
def frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What comes before and after the values of a contiguous tensor, of less than 4 GiB. The first
    part is a multiple of ``ALIGNMENT`` bytes. There is no checksum of the values, as with
    ``set_crc32_options(False)``.
    """
    size = math.prod(sizes) * dtype.itemsize
    records = [
        ("archive/data.pkl", _pickle(dtype, sizes)),
        ("archive/version", b"3\n"),
        ("archive/byteorder", sys.byteorder.encode()),
    ]
    head = b""
    entries = b""
    for name, content in records:
        numbers = (zlib.crc32(content), len(content), len(content))
        entries += _entry(name, numbers, len(head))
        head += _local(name, numbers, b"") + content
    values = "archive/data/0"
    entries += _entry(values, (0, size, size), len(head))
    padding = -(len(head) + len(_local(values, (0, size, size), b"")) + 4) % ALIGNMENT
    head += _local(values, (0, size, size), struct.pack("<2sH", b"FB", padding) + b"Z" * padding)
    count = len(records) + 1
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(entries), len(head) + size, 0)
    return head, entries + end


def _local(name: str, numbers: tuple[int, int, int], extra: bytes) -> bytes:
    """A record's header, before its content. numbers: checksum, size as stored, size."""
    return (
        struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, _DATE, *numbers, len(name), len(extra))
        + name.encode()
        + extra
    )


def _entry(name: str, numbers: tuple[int, int, int], position: int) -> bytes:
    """A record's entry in the list at the end."""
    fields = (20, 20, 0, 0, 0, _DATE, *numbers, len(name), 0, 0, 0, 0, 0, position)
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields) + name.encode()


class _Storage:
    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.id = ("storage", getattr(torch, _STORAGES[dtype]), "0", "cpu", numel)


class _Tensor:
    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        storage = _Storage(dtype, math.prod(sizes))
        hooks: OrderedDict[str, object] = OrderedDict()
        # The storage, the offset in it, sizes, strides, whether a gradient is needed.
        self._arguments = (storage, 0, sizes, strides, False, hooks)

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
        return torch._utils._rebuild_tensor_v2, self._arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[str, type, str, str, int] | None:
        return obj.id if isinstance(obj, _Storage) else None


def _pickle(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Tensor(dtype, sizes))
    return stream.getvalue()


@dataclass(frozen=True)
class StoredTensor:
    """start: of its storage in the file, in bytes.

    offset, strides: of its elements in the storage of ``numel``.
    """

    dtype: torch.dtype
    start: int
    numel: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def read_header(file: int, start: int, length: int) -> StoredTensor:
    """The tensor that `torch.save` wrote at ``start`` of an open file.

    Raises ``OSError``, ``zipfile.BadZipFile`` or ``pickle.UnpicklingError`` where there is none.
    Nothing but the tensor's description is unpickled.
    """
    with zipfile.ZipFile(_Slice(file, start, length)) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        description = records.get("data.pkl")
        if description is None:
            raise pickle.UnpicklingError("no tensor")
        (dtype, key, numel), offset, sizes, strides = _Unpickler(
            io.BytesIO(archive.read(description))
        ).load()
    values = records[f"data/{key}"]
    if values.compress_type != zipfile.ZIP_STORED or values.file_size != numel * dtype.itemsize:
        raise zipfile.BadZipFile(
            f"{values.file_size} bytes of values for {numel} elements of {dtype}"
        )
    name, extra = struct.unpack("<2H", os.pread(file, 4, start + values.header_offset + 26))
    return StoredTensor(
        dtype,
        start + values.header_offset + 30 + name + extra,
        numel,
        offset,
        tuple(sizes),
        tuple(strides),
    )


class _Unpickler(pickle.Unpickler):
    """Reads what describes one tensor: ((dtype, key, numel), offset, sizes, strides)."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, sizes, strides, *_: (storage, offset, sizes, strides)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Sequence[Any]) -> tuple[torch.dtype, str, int]:
        _, dtype, key, _, numel = pid
        return dtype, key, numel


class _Slice(io.RawIOBase):
    """A part of an open file, as a file to read."""

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        content = os.pread(
            self._file, left if size < 0 else min(size, left), self._start + self._position
        )
        self._position += len(content)
        return content
