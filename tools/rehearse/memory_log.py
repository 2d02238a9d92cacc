"""Device memory by kind, operation by operation: live storages, their peak, and what was alive
at it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.tools.rehearse.call_sites import Frames, call_site, frames_above
from megatron_gspo.tools.rehearse.records import KINDS, Allocation, Memory, MemoryPoint


@dataclass(eq=False)
class LiveStorage:
    """A storage on the device. born: the operation that allocated it, by number."""

    bytes: int
    kind: str
    phase: str
    op: str
    frames: Frames
    shape: tuple[int, ...]
    dtype: torch.dtype
    born: int
    reference: weakref.ref[torch.UntypedStorage] | None = None


@dataclass
class _Point:
    phase: str
    index: int
    op: str
    frames: Frames
    bytes: dict[str, int]
    total: int

    def public(self) -> MemoryPoint:
        return MemoryPoint(self.phase, self.index, self.op, call_site(self.frames), self.bytes)


class MemoryLog:
    """Watches storages from their first tensor to their end.

    kind: what new storages count as. A storage is identified by its address, which torch reuses
    only after its end.
    """

    def __init__(self) -> None:
        self.phase = "build"
        self.kind = "buffers"
        self.index = 0
        self.live: dict[int, LiveStorage] = {}
        self.bytes = dict.fromkeys(KINDS, 0)
        self.total = 0
        self.states: dict[str, int] = {}
        self._peak = self._activation_peak = _Point("build", 0, "", (), dict(self.bytes), 0)
        self._gone: list[LiveStorage] = []  # alive at the peak
        self._phase_peaks: dict[str, _Point] = {}

    def add(self, tensor: Tensor, op: str, kind: str | None = None) -> None:
        """Count a tensor's storage unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self.live or not size:
            return
        kind = kind or self.kind
        entry = LiveStorage(
            size,
            kind,
            self.phase,
            op,
            frames_above(2),
            tuple(tensor.shape),
            tensor.dtype,
            self.index,
        )
        entry.reference = weakref.ref(storage, lambda _, key=key: self._remove(key))  # type: ignore[misc]
        self.live[key] = entry
        self._change(kind, size)
        self._note(entry)

    def relabel(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Count the storages of these tensors as ``kind``; returns their bytes."""
        total = 0
        for key in {tensor.untyped_storage()._cdata for tensor in tensors}:
            entry = self.live.get(key)
            if entry is not None:
                self._change(entry.kind, -entry.bytes)
                entry.kind = kind
                self._change(kind, entry.bytes)
                total += entry.bytes
        return total

    @contextlib.contextmanager
    def watch_resizes(self) -> Iterator[None]:
        """Within the context storages that get another size are seen, such as 0 to free them
        early.
        """
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self.live.get(storage._cdata)
        if entry is not None:
            self._change(entry.kind, storage.nbytes() - entry.bytes)
            entry.bytes = storage.nbytes()
            self._note(entry)

    def _remove(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self._change(entry.kind, -entry.bytes)
            if entry.born <= self._peak.index:
                self._gone.append(entry)

    def _change(self, kind: str, size: int) -> None:
        self.bytes[kind] += size
        self.total += size

    def _note(self, entry: LiveStorage) -> None:
        """Look at the totals after an allocation."""
        largest = self._phase_peaks.get(self.phase)
        if largest is None or self.total > largest.total:
            self._phase_peaks[self.phase] = self._point(entry)
        if self.total > self._peak.total:
            self._peak = self._phase_peaks[self.phase]
            self._gone.clear()
        if self.phase == "forward_backward":
            if self.bytes["activations"] > self._activation_peak.bytes["activations"]:
                self._activation_peak = self._point(entry)

    def _point(self, entry: LiveStorage) -> _Point:
        return _Point(self.phase, self.index, entry.op, entry.frames, dict(self.bytes), self.total)

    def result(self, most: int = 40) -> Memory:
        """The record; ``most``: rows of what was alive at the peak."""
        sizes: Counter[tuple[str, str, tuple[int, ...], str]] = Counter()
        counts: Counter[tuple[str, str, tuple[int, ...], str]] = Counter()
        alive = [entry for entry in self.live.values() if entry.born <= self._peak.index]
        for entry in (*alive, *self._gone):
            key = entry.kind, entry.op, entry.shape, str(entry.dtype).removeprefix("torch.")
            sizes[key] += entry.bytes
            counts[key] += 1
        return Memory(
            states=dict(self.states),
            peak=self._peak.public(),
            peak_activations=self._activation_peak.public(),
            peaks={phase: point.public() for phase, point in self._phase_peaks.items()},
            largest=tuple(
                Allocation(*key, counts[key], size) for key, size in sizes.most_common(most)
            ),
        )
