"""Proof that a Hugging Face checkpoint and a Megatron one hold the same weights, bit for bit;
and checksums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.errors import writing
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.families import family_of, hugging_face_names
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.model_shape import ModelError, ModelShape, read_config
from megatron_gspo.models.parameter_slices import CheckpointChunk
from megatron_gspo.tools.convert.carried_tensors import CARRIED, compare_carried
from megatron_gspo.tools.convert.to_hugging_face import as_stored, by_part, read_part
from megatron_gspo.tools.convert.to_megatron import COMPANIONS
from megatron_gspo.tools.convert.torch_dcp_files import open_checkpoint
from megatron_gspo.tools.convert.work_units import Unit, Workers, cut, run_units

CHECKSUMS = "SHA256SUMS"  # as the command sha256sum writes and checks it
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class _Work:
    hugging_face: Path
    megatron: Path
    parts: tuple[tuple[CheckpointChunk, ...], ...]
    dtype: torch.dtype
    shape: ModelShape


def verify(
    hugging_face: Path,
    megatron: Path,
    chunks: Sequence[CheckpointChunk],
    *,
    dtype: torch.dtype,
    workers: Workers = Workers(),
) -> int:
    """Compare every tensor of the two, rebuilt from the Megatron checkpoint's chunks; returns their
    number.

    chunks: as for `to_hugging_face`. dtype: of the converted one, to which the other is cast.
    Raises ``ModelError`` naming a tensor that differs, is missing, or belongs to neither or both of
    two parameters.
    """
    family, shape = family_of(read_config(hugging_face))
    with CheckpointReader(hugging_face) as reader:
        check_checkpoint(reader, family, shape)
    parts = by_part(as_stored(open_checkpoint(megatron), chunks))
    made = sorted(name for of_part in parts.values() for name in of_part[0].part.names)
    if made != sorted(hugging_face_names(family, shape)):
        raise ModelError(
            f"{megatron}: its parameters are not made of each tensor of {hugging_face} exactly once"
        )

    def size(of_part: tuple[CheckpointChunk, ...]) -> int:
        return sum(chunk.numel for chunk in of_part) * dtype.itemsize

    units = [
        Unit(number, sum(map(size, run)), _Work(hugging_face, megatron, tuple(run), dtype, shape))
        for number, run in enumerate(cut(parts.values(), size, workers.unit_bytes))
    ]
    run_units(_compare, units, workers)
    carried = 0
    if (megatron / COMPANIONS / CARRIED).is_file():
        carried = compare_carried(hugging_face, megatron / COMPANIONS, shape)
    return len(made) + carried


def _compare(work: _Work) -> None:
    stored = open_checkpoint(work.megatron)
    with CheckpointReader(work.hugging_face) as reader:
        for chunks in work.parts:
            value = read_part(stored, chunks)
            for name, tensor in chunks[0].part.split(value, work.shape).items():
                dtype = chunks[0].part.stored_as(work.dtype)
                if not _same(reader.read(name).to(dtype), tensor.to(dtype)):
                    both = f"{work.hugging_face} and {work.megatron}"
                    raise ModelError(f"{name} differs between {both}; convert it again")


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, so that NaN equals itself and 0 is not -0."""
    bits = _BITS[a.dtype.itemsize]
    return a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def write_checksums(folder: Path) -> Path:
    """`SHA256SUMS` of every file in a directory, for ``sha256sum --check``."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != CHECKSUMS)
    lines = []
    for file in files:
        with file.open("rb") as stream:
            lines.append(
                f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {file.relative_to(folder)}\n"
            )
    with writing(folder / CHECKSUMS):
        (folder / CHECKSUMS).write_text("".join(lines))
    return folder / CHECKSUMS
