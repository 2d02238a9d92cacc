"""A bucket in SGLang's "flattened_bucket" format, as /update_weights_from_tensor takes it; SGLang's
code is not used.

The server unpickles a dictionary of one flat byte tensor and, for each tensor in it, an object with
name, sizes, dtype and place; it reads attributes only, so `types.SimpleNamespace` serves, which its
list of allowed names holds in every supported version. The tensor is either in the pickle, by
value, or a handle to memory that both processes map.
"""

from __future__ import annotations

import collections
import io
import pickle
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_gspo.weight_transport.buckets import Bucket

_PROTOCOL = 3  # the last without frames, whose lengths would have to be corrected
_DEVICE = 6  # index of the device among the arguments of torch's rebuild_cuda_tensor


def by_value(bucket: Bucket) -> list[bytes | memoryview]:
    """The pickle in pieces, the bucket's own memory among them: nothing is copied.

    bucket: on the CPU.
    """
    memory = bucket.data.numpy()
    exact = torch.from_numpy(memory)  # a storage of just these bytes: torch saves whole storages
    saved = _Pieces(memory)
    storage = torch.storage.TypedStorage(
        wrap_storage=exact.untyped_storage(), dtype=torch.uint8, _internal=True
    )
    torch.save(storage, saved, _use_new_zipfile_serialization=False)  # type: ignore[arg-type] # it only writes
    size = sum(len(piece) for piece in saved.pieces)
    # the pickler would copy the bytes: it gets a stand-in, whose place they take below
    stand_in = b"\0the saved storage\0"
    whole = _pickle(bucket, lambda: (torch.storage._load_from_bytes, (stand_in,)))
    mark = pickle.SHORT_BINBYTES + bytes([len(stand_in)]) + stand_in
    before, separator, after = whole.partition(mark)
    if not separator or mark in after:
        raise AssertionError("the pickled bucket does not hold its stand-in once")
    return [before + pickle.BINBYTES8 + size.to_bytes(8, "little"), *saved.pieces, after]


def by_handle(bucket: Bucket) -> bytes:
    """The pickle with a handle to the bucket's memory: CUDA IPC for a CUDA bucket, else POSIX
    shared memory.

    The receiver maps the memory while it copies; every handle is for one receiver, since it counts
    the references. Raises ValueError for a CPU bucket that isn't packed into a `shared_buffer`: to
    share it would copy it first.
    """
    data = bucket.data
    if data.is_cuda:
        rebuild, arguments = reductions.reduce_tensor(data)
        # Indices differ between the processes.
        device = str(torch.cuda.get_device_properties(data.device).uuid)
        arguments = (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])
        return _pickle(bucket, None, (rebuild, arguments))
    storage = data.untyped_storage()
    if not storage.is_shared():
        raise ValueError("the bucket is not in shared memory: pack it with allocate=shared_buffer")
    manager, handle, size = storage._share_filename_cpu_()
    storage._shared_incref()  # the receiver takes it back
    arguments = (torch.storage.TypedStorage, manager, handle, size, torch.uint8)
    return _pickle(bucket, lambda: (reductions.rebuild_storage_filename, arguments))


def shared_buffer(size: int, device: torch.device) -> Tensor:
    """[size] uint8 in memory that another process can map by a handle: on `device` if that is
    CUDA, else shared.
    """
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    return torch.empty(0, dtype=torch.uint8).set_(
        torch.UntypedStorage._new_using_filename_cpu(size)
    )


def is_this_machine(host: str) -> bool:
    """Whether a name or address is one of this machine's own: a socket can be bound to it."""
    try:
        family, socket_type, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket_type) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


class _Pieces:
    """A file that keeps what is written to it: parts of `memory` [bytes] as views that keep it,
    all else copied.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.pieces: list[bytes | memoryview] = []
        self._memory = memory

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")  # of torch's own, which keep nothing
        start = -1
        if len(view):
            start = np.frombuffer(view, np.uint8).ctypes.data - self._memory.ctypes.data
        if 0 <= start < len(self._memory):
            self.pieces.append(self._memory.data[start : start + len(view)])
        else:
            self.pieces.append(bytes(view))
        return len(view)

    def flush(self) -> None:
        pass


class _Storage:
    """Stands for the storage of the flat tensor while it is pickled."""


class _Flat:
    """Stands for the flat tensor itself."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, reduced: dict[type, Any]) -> None:
        super().__init__(file, _PROTOCOL)
        self._reduced = reduced

    def reducer_override(self, value: Any) -> Any:
        return self._reduced.get(type(value), NotImplemented)


def _pickle(bucket: Bucket, storage: Callable[[], Any] | None, tensor: Any = None) -> bytes:
    """storage: what rebuilds the flat tensor's storage; tensor: what rebuilds it whole, in its
    place.
    """
    if tensor is None:
        tensor = (
            torch._utils._rebuild_tensor_v2,
            (_Storage(), 0, (bucket.nbytes,), (1,), False, collections.OrderedDict()),
        )
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.stop,
            numel=entry.stop - entry.start,
        )
        for entry in bucket.entries
    ]
    file = io.BytesIO()
    reduced: dict[type, Any] = {_Flat: tensor}
    if storage is not None:
        reduced[_Storage] = storage()
    _Pickler(file, reduced).dump({"flattened_tensor": _Flat(), "metadata": metadata})
    return file.getvalue()
