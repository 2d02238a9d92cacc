"""Reading regions of a distributed checkpoint's tensors into a rank's own, from any layout."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor

from megatron_gspo.mcore.checkpoint.checkpoint_files import STATE
from megatron_gspo.mcore.checkpoint.metadata_file import (
    METADATA,
    StoredPart,
    read_metadata,
    stored_parts,
)
from megatron_gspo.mcore.checkpoint.pieces import Piece
from megatron_gspo.mcore.checkpoint.stored_tensors import StoredTensor, read_header
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box

_BUFFER = 16 << 20  # bytes; rows that are larger are read one at a time
# names of the optimizer's main weights; the second is Megatron's without the distributed optimizer
_MAIN = "optimizer.state.param."
_MAIN_OF_REPLICAS = "optimizer.state.fp32_param."


class MismatchError(ValueError):
    """The checkpoint lacks what the model has, in one line."""


@dataclass(frozen=True)
class _Read:
    """The region ``box`` of a tensor, from a stored part into ``target`` of the region's sizes."""

    part: StoredPart
    box: Box
    target: Tensor


def read_pieces(
    path: Path, pieces: Iterable[Piece], *, stored: Mapping[str, list[StoredPart]] | None = None
) -> None:
    """Fill the pieces' values from the checkpoint ``path``. What the checkpoint pads less is 0.
    stored: the parts of each tensor by its key, if they have been read.

    Raises ``MismatchError`` where a tensor is missing or of other sizes, ``ValueError`` where a
    part of one is missing or stored in another way, and what `read_header` and the file system
    raise. Memory: 16 MiB, or the largest row of a stored tensor.
    """
    if stored is None:
        stored = stored_parts(read_metadata(path / METADATA))
    chosen: dict[tuple[object, ...], Piece] = {}
    for piece in pieces:  # where main weights and the model's are one, the main weights
        if piece.memory not in chosen or _parts(piece, stored):
            chosen[piece.memory] = piece
    reads = [read for piece in chosen.values() for read in _plan(piece, stored)]
    reads.sort(key=lambda read: (read.part.file, read.part.start))
    buffer = torch.empty(
        _BUFFER, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available()
    )
    file = -1
    name = ""
    part = None
    try:
        for read in reads:
            if read.part.file != name:
                file = _reopened(file, path / read.part.file)
                name = read.part.file
                part = None
            if part is None or part.start != read.part.start:
                part = read.part
                header = read_header(file, read.part.start, read.part.length)
            _copy_region(file, header, read, buffer)
    finally:
        if file >= 0:
            os.close(file)


def read_steps(path: Path) -> dict[str, float]:
    """The checkpoint's step counts of ``optimizer`` and ``schedule``, and other numbers of the
    optimizer's state as ``optimizer.NAME``.

    Earlier versions had Megatron store them.
    """
    steps = json.loads((path / STATE).read_text(encoding="utf-8")).get("steps")
    if steps:
        return dict(steps)
    if (path / COMMON_STATE_FNAME).is_file():
        common = torch.load(path / COMMON_STATE_FNAME, weights_only=True)
    else:
        [part] = stored_parts(read_metadata(path / METADATA))["common_state/shard_0_1"]
        with (path / part.file).open("rb") as file:
            file.seek(part.start)
            [common] = torch.load(io.BytesIO(file.read(part.length)), weights_only=True)
    return {"optimizer": int(common["optimizer_step"]), "schedule": int(common["schedule_step"])}


def _plan(piece: Piece, stored: Mapping[str, list[StoredPart]]) -> Iterator[_Read]:
    parts = _parts(piece, stored)
    if not parts or not parts[0].whole:
        raise MismatchError(f"it has no {piece.key}")
    whole = parts[0].whole
    if whole != piece.whole and not (piece.is_padded and whole[1:] == piece.whole[1:]):
        raise MismatchError(
            f"{piece.key} is {list(whole)} there and {list(piece.whole)} in the model"
        )
    wanted = Box((0,) * len(whole), whole).within(piece.box)
    if wanted is None or wanted.numel < piece.box.numel:
        piece.values.zero_()
    missing = 0 if wanted is None else wanted.numel
    target = piece.values.view(piece.box.sizes)
    for part in parts:
        assert part.box is not None
        box = part.box.within(piece.box)
        if box is not None:
            missing -= box.numel
            yield _Read(part, box, _region(target, box, piece.box.offsets))
    if missing:
        raise ValueError(f"{missing} elements of {piece.key} are missing")


def _parts(piece: Piece, stored: Mapping[str, list[StoredPart]]) -> list[StoredPart]:
    return stored.get(piece.key) or stored.get(piece.key.replace(_MAIN, _MAIN_OF_REPLICAS, 1)) or []


def _region(tensor: Tensor, box: Box, origin: Sequence[int]) -> Tensor:
    """The view of ``box`` in a tensor whose first element is at ``origin``."""
    for dim, (offset, size, zero) in enumerate(zip(box.offsets, box.sizes, origin, strict=True)):
        tensor = tensor.narrow(dim, offset - zero, size)
    return tensor


def _copy_region(file: int, header: StoredTensor, read: _Read, buffer: Tensor) -> None:
    """Read whole rows of the stored tensor, as many at a time as the buffer holds, and copy the
    region's part. Rows that the target has as they are stored are read into it."""
    assert read.part.box is not None
    sizes = header.sizes
    offsets = tuple(a - b for a, b in zip(read.box.offsets, read.part.box.offsets, strict=True))
    if sizes != read.part.box.sizes or header.offset or not _is_contiguous(header):
        raise ValueError(f"{read.part.key} is stored as {header}")
    # Rows are counted along the first dimension that has several.
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes) - 1)
    row_elements = math.prod(sizes[dim + 1 :])
    row_bytes = row_elements * header.dtype.itemsize
    step = max(1, buffer.numel() // row_bytes)
    for first in range(0, read.box.sizes[dim], step):
        count = min(step, read.box.sizes[dim] - first)
        size = count * row_bytes
        at = header.start + (offsets[dim] + first) * row_bytes
        target = read.target.narrow(dim, first, count)
        if _is_stored_alike(target, header, target.numel() == count * row_elements):
            _read_exactly(file, target.view(-1).view(torch.uint8).numpy().data, at)
            continue
        content = buffer[:size] if size <= buffer.numel() else torch.empty(size, dtype=torch.uint8)
        _read_exactly(file, content.numpy().data, at)
        values = content.view(header.dtype).view(*sizes[:dim], count, *sizes[dim + 1 :])
        inner = Box(
            (*offsets[:dim], 0, *offsets[dim + 1 :]),
            (*read.box.sizes[:dim], count, *read.box.sizes[dim + 1 :]),
        )
        target.copy_(_region(values, inner, [0] * len(sizes)))


def _is_stored_alike(target: Tensor, header: StoredTensor, whole_rows: bool) -> bool:
    return (
        whole_rows
        and target.device.type == "cpu"
        and target.dtype == header.dtype
        and target.is_contiguous()
    )


def _is_contiguous(header: StoredTensor) -> bool:
    sizes = header.sizes
    expected = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    return all(
        size == 1 or a == b for size, a, b in zip(sizes, header.strides, expected, strict=True)
    )


def _read_exactly(file: int, content: memoryview, at: int) -> None:
    done = 0
    while done < len(content):
        count = os.preadv(file, [content[done:]], at + done)
        if not count:
            raise OSError(f"the file ends {len(content) - done} bytes too early")
        done += count


def _reopened(file: int, path: Path) -> int:
    if file >= 0:
        os.close(file)
    file = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file
