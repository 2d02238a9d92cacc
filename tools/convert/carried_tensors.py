"""Tensors of a checkpoint that are not trained, multi-token prediction: kept beside a Megatron
checkpoint, and written back. They are copied one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_gspo.errors import first_line
from megatron_gspo.models.families import carried_names
from megatron_gspo.models.hf_checkpoint import INDEX, SINGLE, CheckpointReader
from megatron_gspo.models.model_shape import ModelError, ModelShape
from megatron_gspo.models.parameter_slices import TensorSource
from megatron_gspo.tools.convert.safetensors_pieces import begin_file, file_layout, write_tensors

CARRIED = "carried.safetensors"


class _Kept:
    """The tensors of a folder's file of carried tensors."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file}: damaged or cut short ({first_line(error)}); convert it again"
            ) from None
        self.names = set(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        return self._file.get_tensor(name)


@contextmanager
def open_carried(
    folder: Path, shape: ModelShape
) -> Iterator[tuple[TensorSource | None, list[str]]]:
    """Carried tensors and their names, in a Hugging Face directory or in the folder beside a
    Megatron checkpoint.
    """
    if (folder / SINGLE).is_file() or _has_weights(folder):
        with CheckpointReader(folder) as reader:
            yield reader, sorted(carried_names(reader.names, shape))
    elif (folder / CARRIED).is_file():
        kept = _Kept(folder / CARRIED)
        yield kept, sorted(kept.names)
    else:
        yield None, []


def _has_weights(folder: Path) -> bool:
    """Whether an index of files is there with the files: a copy of it is beside a Megatron
    checkpoint.
    """
    return (folder / INDEX).is_file() and any(
        file.name != CARRIED for file in folder.glob("*.safetensors")
    )


def copy_carried(source: Path, target: Path, shape: ModelShape) -> dict[str, int]:
    """Write the carried tensors of ``source`` to ``target``'s file; name -> bytes of each, empty
    where there are none.

    Raises ``DiskError``.
    """
    if not shape.carried:
        return {}
    with open_carried(source, shape) as (reader, names):
        if reader is None or not names:
            return {}
        sizes = {name: reader.shape(name) for name in names}
        dtypes = {name: _dtype(reader, name, sizes[name]) for name in names}
        layout = file_layout(sizes, dtypes)
        begin_file(target / CARRIED, layout)
        write_tensors(
            target / CARRIED, ((layout.offsets[name], reader.read(name)) for name in names)
        )
        return {name: torch.Size(sizes[name]).numel() * dtypes[name].itemsize for name in names}


def compare_carried(one: Path, other: Path, shape: ModelShape) -> int:
    """Compare the carried tensors of two folders bit by bit; their number. ``ModelError`` names
    one that differs.
    """
    if not shape.carried:
        return 0
    with open_carried(one, shape) as (first, names), open_carried(other, shape) as (second, others):
        if unequal := set(names) ^ set(others):
            raise ModelError(f"{min(unequal)} is not in both {one} and {other}; convert it again")
        for name in names:
            assert first is not None and second is not None
            a, b = (reader.read(name).contiguous() for reader in (first, second))
            if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                raise ModelError(f"{name} differs between {one} and {other}; convert it again")
        return len(names)


def _dtype(reader: TensorSource, name: str, size: tuple[int, ...]) -> torch.dtype:
    """The type that a tensor is read as, from one row of it."""
    return (reader.read(name, 0, 0, 1) if size else reader.read(name)).dtype
