"""From a Hugging Face checkpoint to a Megatron distributed checkpoint, streamed: no process
holds more than a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.errors import writing
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.companions import companions, copy_companions
from megatron_gspo.models.families import family_of, names_of_own_type
from megatron_gspo.models.hf_checkpoint import INDEX, CheckpointReader
from megatron_gspo.models.model_shape import ModelShape, read_config
from megatron_gspo.models.parameter_slices import CheckpointChunk, ParameterSlice
from megatron_gspo.tools.convert.carried_tensors import copy_carried
from megatron_gspo.tools.convert.torch_dcp_files import Placement, write_file, write_metadata
from megatron_gspo.tools.convert.work_directory import Workspace, file_stamps
from megatron_gspo.tools.convert.work_units import Unit, Workers, cut, run_units

# Of a larger tensor, such as an embedding, that are written at a time: torch copies them twice.
_PIECE_BYTES = 64 << 20
COMPANIONS = "hf"  # the folder of config, tokenizer and index in a converted checkpoint


@dataclass(frozen=True)
class _Work:
    """number: of the file. chunks: in the order of their parts."""

    source: Path
    folder: Path
    number: int
    chunks: tuple[CheckpointChunk, ...]
    objects: dict[str, bytes]
    dtype: torch.dtype
    shape: ModelShape


def to_megatron(
    source: Path,
    out: Path,
    chunks: Sequence[CheckpointChunk],
    objects: Mapping[str, bytes],
    finish: Callable[[Path], None],
    *,
    dtype: torch.dtype | None = None,
    workers: Workers = Workers(),
) -> Path:
    """Convert the Hugging Face directory `source` to the distributed checkpoint `out`; returns
    `out`.

    chunks, objects: what Megatron's checkpoint holds, by `mcore.checkpoint_metadata`. finish:
    writes the files by which Megatron knows it. dtype: of the result; None is the source's.

    An interrupted conversion continues when called again. Raises ``ModelError`` for a source that
    is incomplete or not the model of its config.json; ``InputError`` and ``DiskError``, before any
    work, for an invalid output.
    """
    family, shape = family_of(read_config(source))
    companions(source)
    with CheckpointReader(source) as reader:
        check_checkpoint(reader, family, shape)
        has_index = reader.has_index
        dtype = dtype or reader.common_dtype(names_of_own_type(reader.names, family, shape))
    ordered = sorted(
        chunks, key=lambda chunk: (chunk.part.layer, chunk.part.names, chunk.part.rank, chunk.start)
    )
    ordered = [piece for chunk in ordered for piece in chunk.pieces(_PIECE_BYTES // dtype.itemsize)]
    job = {
        "from": str(source.resolve()),
        "files": file_stamps(source),
        "dtype": str(dtype),
        "unit_bytes": workers.unit_bytes,
        "chunks": _places(ordered),
    }
    with Workspace(out, job) as workspace:
        first = _Work(source, workspace.result, 0, (), dict(objects), dtype, shape)
        units = _units(first, ordered, workers.unit_bytes)
        finished = {unit.number for unit in units if _is_there(workspace, unit)}
        workspace.check_room(sum(unit.size for unit in units if unit.number not in finished))
        run_units(_write, units, workers, finished=finished, record=workspace.record)
        placements = [tuple(place) for unit in units for place in workspace.done[unit.number]]
        with writing(workspace.result):
            write_metadata(workspace.result, ordered, dtype, objects, placements)
            finish(workspace.result)
            folder = workspace.result / COMPANIONS
            folder.mkdir(exist_ok=True)
            copy_companions(source, folder)
            copy_carried(source, folder, shape)
            if has_index:
                (folder / INDEX).write_bytes((source / INDEX).read_bytes())
        return workspace.publish()


def _places(chunks: Iterable[CheckpointChunk]) -> list[str]:
    """The chunks' places in one line each: another layout is another job."""
    return [f"{chunk.key} {chunk.offsets} {chunk.sizes}" for chunk in chunks]


def _units(first: _Work, chunks: Sequence[CheckpointChunk], unit_bytes: int) -> list[Unit]:
    """The chunks in files of one unit each, like `first`, which has the objects."""
    units = []
    for number, run in enumerate(
        cut(chunks, lambda chunk: chunk.numel * first.dtype.itemsize, unit_bytes)
    ):
        size = sum(chunk.numel for chunk in run) * first.dtype.itemsize
        work = replace(
            first, number=number, chunks=tuple(run), objects={} if number else first.objects
        )
        units.append(Unit(number, size, work))
    return units


def _is_there(workspace: Workspace, unit: Unit) -> bool:
    """Whether a unit was done and its file still has every byte."""
    placements: list[Placement] = workspace.done.get(unit.number, [])
    sizes: dict[str, int] = {}
    for _, _, file, start, length in placements:
        sizes[file] = max(sizes.get(file, 0), start + length)
    files = {file: workspace.result / file for file in sizes}
    return bool(sizes) and all(
        path.is_file() and path.stat().st_size == sizes[file] for file, path in files.items()
    )


def _write(work: _Work) -> list[Placement]:
    with CheckpointReader(work.source) as reader:
        last: tuple[ParameterSlice, Tensor] | None = (
            None  # the chunks of one part follow each other
        )

        def make(chunk: CheckpointChunk) -> Tensor:
            nonlocal last
            if last is None or last[0] is not chunk.part and last[0] != chunk.part:
                last = chunk.part, chunk.part.read(reader, work.shape)
            return chunk.view_in(last[1])

        return write_file(work.folder, work.number, work.chunks, make, work.dtype, work.objects)
