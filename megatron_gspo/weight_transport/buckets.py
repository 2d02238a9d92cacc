"""Packs a stream of tensors into buckets of bounded size, one after the other in one buffer of
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """A tensor of a bucket: its name and sizes, and the bytes `[start, stop)` of the bucket
    that it takes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together."""

    entries: tuple[Entry, ...]
    """The tensors in the order of the stream, without gaps; every one begins at a multiple of its
    element size."""

    data: Tensor
    """[bytes] uint8, contiguous; how long it is valid: see `buckets`."""

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of each entry; views of `data`."""
        return [
            (entry.name, self.data[entry.start : entry.stop].view(entry.dtype).view(entry.shape))
            for entry in self.entries
        ]


def buckets(
    named_tensors: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    *,
    device: torch.device | None = None,
    allocate: Callable[[int, torch.device], Tensor] | None = None,
    in_flight: int = 1,
) -> Iterator[Bucket]:
    """Pack a stream into buckets of at most `bucket_bytes // in_flight` bytes.

    `in_flight` buffers of that size serve all buckets in turn, so a bucket is valid until so many
    more are asked for, and these buffers are the memory that the packing costs. A larger tensor is
    sent alone: as it is stored, without a copy, or in a buffer of its own size where `allocate` is
    given. The order of the stream is kept.

    Raises ValueError naming the tensor for a repeated name, before it is packed; ValueError for a
    size below 1.

    Args:
        allocate: (bytes, device of the stream's first tensor) -> uint8 tensor on the device that
            the bytes are wanted on; None: the stream's own device.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: give at least 1")
    packer = _Packer(max(bucket_bytes // in_flight, 1), in_flight, device, allocate)
    seen: set[str] = set()
    for name, tensor in named_tensors:
        if name in seen:
            raise ValueError(f"{name} comes twice in the stream of weights")
        seen.add(name)
        yield from packer.add(name, tensor.detach())
        del tensor  # release the stream's tensor before the next one
    yield from packer.flush()


class _Packer:
    """The buffers, and what has been packed into the last of them since it was taken."""

    def __init__(
        self,
        size: int,
        count: int,
        device: torch.device | None,
        allocate: Callable[[int, torch.device], Tensor] | None,
    ) -> None:
        self._size = size
        self._device = device
        self._allocate = allocate
        # The first is the next to be packed into.
        self._buffers: list[Tensor | None] = [None] * count
        self._buffer: Tensor | None = None
        self._entries: list[Entry] = []
        self._used = 0

    def add(self, name: str, value: Tensor) -> Iterator[Bucket]:
        size = value.numel() * value.element_size()
        if self._used + size > self._size or self._used % value.element_size():
            yield from self.flush()
        if size > self._size:
            yield self._alone(name, value, size)
            return
        if self._buffer is None:
            buffer = self._buffers.pop(0)
            if buffer is None:
                buffer = self._new(self._size, value.device)
            self._buffers.append(buffer)
            self._buffer = buffer
        entry = Entry(name, value.dtype, tuple(value.shape), self._used, self._used + size)
        if size:
            self._buffer[entry.start : entry.stop].view(value.dtype).view(value.shape).copy_(value)
        self._entries.append(entry)
        self._used += size

    def flush(self) -> Iterator[Bucket]:
        """The bucket that is packed, if there is one."""
        if self._entries and self._buffer is not None:
            yield Bucket(tuple(self._entries), self._buffer[: self._used])
            self._buffer = None
        self._entries = []
        self._used = 0

    def _alone(self, name: str, value: Tensor, size: int) -> Bucket:
        if self._allocate is None:
            data = value.to(self._device or value.device).contiguous().view(-1).view(torch.uint8)
        else:
            data = self._new(size, value.device)
            data.view(value.dtype).view(value.shape).copy_(value)
        return Bucket((Entry(name, value.dtype, tuple(value.shape), 0, size),), data)

    def _new(self, size: int, device: torch.device) -> Tensor:
        if self._allocate is None:
            return torch.empty(size, dtype=torch.uint8, device=self._device or device)
        return self._allocate(size, device)


def describe(bucket: Bucket) -> str:
    """For messages: the first name and how many follow."""
    more = len(bucket.entries) - 1
    return bucket.entries[0].name + (f" and {more} more" if more else "")
