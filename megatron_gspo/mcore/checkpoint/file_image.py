"""This rank's file of a checkpoint, in host memory that is allocated once: copied there, then
written as it is.

The memory holds the file's content with the frames of all tensors. A save copies the values to
their places; a thread writes them while training continues. On a GPU the memory is pinned. The file
is written past the page cache where the file system allows it: that is faster, and takes neither
memory nor cores from the training.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.mcore.checkpoint.metadata_file import StoredPart
from megatron_gspo.mcore.checkpoint.pieces import Piece
from megatron_gspo.mcore.checkpoint.stored_tensors import ALIGNMENT, frame
from megatron_gspo.mcore.offload import PAGE, HostBlocks

_BLOCK = 16 << 20  # bytes; each is one write
_DIRECT = getattr(os, "O_DIRECT", 0)
_NICENESS = 5  # where there are too few cores for both, training comes first


class FileImage:
    """``parts``: what the file holds and where."""

    def __init__(
        self,
        name: str,
        pieces: Iterable[Piece],
        objects: Mapping[str, bytes],
        stepped: Sequence[bool] = (),
    ) -> None:
        """pieces: their values are copied by each `copy`; the tensors must stay the same
        objects. stepped: which optimizers had made a step, so that their state is among the pieces.
        """
        self.name = name
        self.stepped = stepped
        self.parts: list[StoredPart] = []
        self._blocks = HostBlocks(_BLOCK)
        self._size = 0
        self._copies: list[tuple[Tensor, list[Tensor]]] = []
        self._put_objects(objects)
        ranges: dict[tuple[object, ...], tuple[int, int]] = {}
        for piece in pieces:
            self._put_tensor(piece, ranges)
        self._put(bytes(-self._size % PAGE))

    @property
    def nbytes(self) -> int:
        """Bytes of the file, and of memory up to a block."""
        return self._size

    def copy(self) -> None:
        """Bring the values of now; they may change when this returns."""
        for values, views in self._copies:
            source = values.view(torch.uint8)
            start = 0
            for view in views:
                view.copy_(source[start : start + view.numel()], non_blocking=True)
                start += view.numel()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def write(self, folder: Path, stopped: Callable[[], bool]) -> None:
        """Write the file into ``folder`` and flush it to the disk. Returns early, with an
        incomplete file, once ``stopped`` is true."""
        file = _open_uncached(folder / self.name)
        try:
            at = 0
            for block in self._blocks.used():
                if stopped():
                    return
                at += _write_all(file, block.numpy().data, at)
            os.fsync(file)
        finally:
            os.close(file)

    def _put_objects(self, objects: Mapping[str, bytes]) -> None:
        starts: dict[bytes, int] = {}  # most layers' are alike
        for key, content in objects.items():
            if content not in starts:
                starts[content] = self._size
                self._put(content)
            self.parts.append(StoredPart(key, self.name, starts[content], len(content)))

    def _put_tensor(self, piece: Piece, ranges: dict[tuple[object, ...], tuple[int, int]]) -> None:
        """Reserve its range of the file, once for pieces with the same values."""
        values = piece.values
        dtype = piece.values.dtype
        if piece.memory not in ranges:
            self._put(bytes(-self._size % ALIGNMENT))
            head, tail = frame(dtype, piece.box.sizes)
            start = self._size
            self._put(head)
            self._copies.append((values, self._reserve(values.numel() * dtype.itemsize)))
            self._put(tail)
            ranges[piece.memory] = (start, self._size - start)
        start, length = ranges[piece.memory]
        self.parts.append(
            StoredPart(piece.key, self.name, start, length, piece.box, piece.whole, dtype)
        )

    def _put(self, content: bytes) -> None:
        start = 0
        for view in self._reserve(len(content)):
            values = bytearray(content[start : start + view.numel()])
            view.copy_(torch.frombuffer(values, dtype=torch.uint8))
            start += view.numel()

    def _reserve(self, size: int) -> list[Tensor]:
        self._size += size
        return self._blocks.allocate(size)


def _open_uncached(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | _DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it
            raise
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, flags, 0o644)


def _write_all(file: int, content: memoryview, at: int) -> int:
    done = 0
    while done < len(content):
        try:
            done += os.pwrite(file, content[done:], at + done)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
            # What is left is no multiple of the disk's blocks.
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return done


class Job:
    """A function that runs in a thread. ``failure``: why it failed, in one line; "" otherwise."""

    def __init__(
        self, function: Callable[[], None], describe: Callable[[BaseException], str]
    ) -> None:
        self.failure = ""
        self._function = function
        self._describe = describe
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_over(self, timeout: float | None = 0.0) -> bool:
        """Whether it is over within ``timeout`` seconds; None waits."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + _NICENESS)
        try:
            self._function()
        except BaseException as error:
            self.failure = self._describe(error)
