"""From a Megatron distributed checkpoint to a Hugging Face one.

A process holds a few tensors at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.errors import writing
from megatron_gspo.mcore.checkpoint.stored_keys import Place, is_weight, stored_place
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box
from megatron_gspo.models.companions import companions, copy_companions
from megatron_gspo.models.families import family_of, hugging_face_names
from megatron_gspo.models.hf_checkpoint import INDEX, SINGLE, read_index
from megatron_gspo.models.model_shape import ModelError, ModelShape, read_config
from megatron_gspo.models.parameter_slices import CheckpointChunk, ParameterSlice
from megatron_gspo.models.stacked_experts import stacked_sizes, tensor_of
from megatron_gspo.tools.convert.carried_tensors import CARRIED, copy_carried, open_carried
from megatron_gspo.tools.convert.safetensors_pieces import (
    FileLayout,
    begin_file,
    file_layout,
    is_begun,
    write_tensors,
)
from megatron_gspo.tools.convert.torch_dcp_files import DistributedReader, open_checkpoint
from megatron_gspo.tools.convert.work_directory import Workspace, file_stamps
from megatron_gspo.tools.convert.work_units import Unit, Workers, cut, run_units

_FIRST_FILE = "model-00001-of-00001.safetensors"
# Cache of parameters: query, key and value are one parameter, but not consecutive tensors.
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class _Work:
    """names: consecutive tensors of one file.

    offsets: theirs in the file. chunks: of the parameters that hold them.
    """

    checkpoint: Path
    file: Path
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    chunks: tuple[CheckpointChunk, ...]
    dtype: torch.dtype
    shape: ModelShape


def to_hugging_face(
    checkpoint: Path,
    out: Path,
    chunks: Sequence[CheckpointChunk],
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    workers: Workers = Workers(),
) -> Path:
    """Convert the distributed checkpoint to the Hugging Face directory `out`; returns `out`.

    chunks: the content of Megatron's checkpoint of the model (``checkpoint_metadata`` of one rank).
    source: config, tokenizer and, if it has an index, the assignment of tensors to files; otherwise
    files have at most ``max_shard_bytes``. dtype: of the result; None is the checkpoint's.
    Optimizer and random states are left out.

    An interrupted conversion continues when called again. Raises the errors of ``to_megatron``.
    """
    companions(source)
    family, shape = family_of(read_config(source))
    reader = open_checkpoint(checkpoint)
    chunks = as_stored(reader, chunks)
    reader.check({chunk.key for chunk in chunks})
    dtype = dtype or _common_dtype(reader, chunks)
    sizes = {name: size for chunk in chunks for name, size in chunk.part.whole_sizes(shape).items()}
    names = list(hugging_face_names(family, shape))
    whole = stacked_sizes({name: sizes[name] for name in names}, shape.num_experts)
    files = _files(source, whole, dtype, max_shard_bytes)
    with open_carried(source, shape) as (_, carried):
        if carried and list(files) == [SINGLE]:  # of which Transformers would read that file alone
            files = {_FIRST_FILE: files[SINGLE]}
    job = {
        "from": str(checkpoint.resolve()),
        "files": file_stamps(checkpoint),
        "dtype": str(dtype),
        "unit_bytes": workers.unit_bytes,
        "to": {file: sorted(names) for file, names in files.items()},
    }
    dtypes = {
        tensor_of(name)[0]: chunk.part.stored_as(dtype)
        for chunk in chunks
        for name in chunk.part.names
    }
    layouts = {
        file: _with_slices(
            file_layout({name: whole[name] for name in held}, dtypes), names, sizes, dtype
        )
        for file, held in files.items()
    }
    with Workspace(out, job) as workspace:
        first = _Work(checkpoint, workspace.result, (), (), (), dtype, shape)
        units = _units(first, layouts, chunks, sizes, workers.unit_bytes)
        begun = {
            file for file, layout in layouts.items() if is_begun(workspace.result / file, layout)
        }
        finished = {
            unit.number
            for unit in units
            if unit.number in workspace.done and unit.work.file.name in begun
        }
        workspace.check_room(
            sum(layout.size for file, layout in layouts.items() if file not in begun)
        )
        for file in layouts.keys() - begun:
            begin_file(workspace.result / file, layouts[file])
        run_units(_write, units, workers, finished=finished, record=workspace.record)
        with writing(workspace.result):
            total = sum(map(_values, layouts.values()))
            _finish(workspace.result, files, total, source, dtype, shape)
        return workspace.publish()


def as_stored(
    reader: DistributedReader, chunks: Sequence[CheckpointChunk]
) -> list[CheckpointChunk]:
    """The chunks with the keys that the checkpoint uses.

    Raises ``ModelError`` that names a weight which is missing, extra or of the wrong shape.
    """
    stored = reader.tensors
    num_layers = 1 + max(chunk.part.layer for chunk in chunks)
    chunks = [_placed(chunk, stored, num_layers) for chunk in chunks]
    wanted = {chunk.key: chunk for chunk in chunks}
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ModelError(
            f"{reader.path} lacks {missing[0]} ({len(missing)} missing); it is not of config.json's"
            " model"
        )
    extra = sorted(key for key in stored.keys() - wanted.keys() if is_weight(key))
    if extra:
        raise ModelError(
            f"{reader.path} has {extra[0]}, which the model does not use ({len(extra)} extra)"
        )
    for key, chunk in wanted.items():
        same = stored[key] == chunk.whole
        if chunk.part.rule.is_vocabulary:  # padded for the layout in which it was saved
            same = stored[key][0] >= chunk.whole[0] and stored[key][1:] == chunk.whole[1:]
        if not same:
            raise ModelError(
                f"{key} is {stored[key]} in {reader.path}; config.json makes it {chunk.whole}"
            )
    return chunks


def _placed(
    chunk: CheckpointChunk, stored: Mapping[str, tuple[int, ...]], num_layers: int
) -> CheckpointChunk:
    place = Place(chunk.key, chunk.whole, Box(chunk.offsets, chunk.sizes))
    place = stored_place(place, stored, num_layers)
    box = place.box
    return replace(chunk, key=place.key, whole=place.whole, offsets=box.offsets, sizes=box.sizes)


def read_part(reader: DistributedReader, chunks: Sequence[CheckpointChunk]) -> Tensor:
    """The parameter of which these are all chunks."""
    value = torch.empty(chunks[0].part.sizes, dtype=reader.dtype(chunks[0].key))
    for chunk in chunks:
        reader.read_into(value, chunk)
    return value


def by_part(chunks: Sequence[CheckpointChunk]) -> dict[str, tuple[CheckpointChunk, ...]]:
    """The chunks of each parameter, under the first of its Hugging Face names."""
    chunks_of_part: dict[str, list[CheckpointChunk]] = {}
    for chunk in chunks:
        chunks_of_part.setdefault(chunk.part.names[0], []).append(chunk)
    return {name: tuple(of_part) for name, of_part in chunks_of_part.items()}


def _common_dtype(reader: DistributedReader, chunks: Sequence[CheckpointChunk]) -> torch.dtype:
    kinds = {
        reader.dtype(chunk.key): chunk.key for chunk in chunks if not chunk.part.rule.keeps_float32
    }
    if len(kinds) > 1:
        (a, first), (b, second) = list(kinds.items())[:2]
        raise ModelError(
            f"{first} is {a} and {second} {b} in {reader.path}; choose one with --dtype"
        )
    return next(iter(kinds))


def _files(
    source: Path, sizes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> dict[str, list[str]]:
    """File -> names of its tensors, as in the source's index if that has all names."""
    if (source / INDEX).is_file():
        weight_map = read_index(source)
        is_stale = (source / SINGLE).is_file() and SINGLE not in weight_map.values()
        files: dict[str, list[str]] = {}
        for name in sizes:
            files.setdefault(str(weight_map.get(name)), []).append(name)
        if "None" not in files and not is_stale:
            return dict(sorted(files.items()))
    runs = list(cut(sizes, lambda name: math.prod(sizes[name]) * dtype.itemsize, max_shard_bytes))
    if len(runs) == 1 or (source / SINGLE).is_file():
        return {SINGLE: list(sizes)}
    return {f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors": run for i, run in enumerate(runs)}


def _with_slices(
    layout: FileLayout,
    names: Sequence[str],
    sizes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> FileLayout:
    """The layout with the offset of each expert's slice in the place of a tensor's of all
    experts.
    """
    slices: dict[str, list[str]] = {}
    for name in names:
        slices.setdefault(tensor_of(name)[0], []).append(name)
    offsets = {
        name: start + (tensor_of(name)[1] or 0) * math.prod(sizes[name]) * dtype.itemsize
        for tensor, start in layout.offsets.items()
        for name in slices[tensor]
    }
    return replace(layout, offsets=offsets)


def _units(
    first: _Work,
    layouts: Mapping[str, FileLayout],
    chunks: Sequence[CheckpointChunk],
    sizes: Mapping[str, tuple[int, ...]],
    unit_bytes: int,
) -> list[Unit]:
    """Units of consecutive tensors of one file; the other fields are those of ``first``, whose
    file is the folder.
    """
    parts = by_part(chunks)
    part_of = {name: key for key, of_part in parts.items() for name in of_part[0].part.names}
    units: list[Unit] = []
    for file, layout in layouts.items():
        for names in cut(
            layout.offsets, lambda name: math.prod(sizes[name]) * first.dtype.itemsize, unit_bytes
        ):
            needed = tuple(
                chunk
                for key in dict.fromkeys(part_of[name] for name in names)
                for chunk in parts[key]
            )
            offsets = tuple(layout.offsets[name] for name in names)
            work = replace(
                first, file=first.file / file, names=tuple(names), offsets=offsets, chunks=needed
            )
            size = sum(math.prod(sizes[name]) for name in names) * first.dtype.itemsize
            units.append(Unit(len(units), size, work))
    return units


def _write(work: _Work) -> None:
    write_tensors(work.file, _tensors(work))


def _tensors(work: _Work) -> Iterator[tuple[int, Tensor]]:
    reader = open_checkpoint(work.checkpoint)
    parts = by_part(work.chunks)
    part_of: dict[str, ParameterSlice] = {
        name: chunk.part for chunk in work.chunks for name in chunk.part.names
    }
    kept: dict[str, Tensor] = {}
    for name, offset in zip(work.names, work.offsets, strict=True):
        part = part_of[name]
        key = part.names[0]
        if key not in kept:
            kept[key] = read_part(reader, parts[key])
            while len(kept) > 1 and sum(value.nbytes for value in kept.values()) > _KEPT_BYTES:
                del kept[next(iter(kept))]
        yield offset, part.split(kept[key], work.shape)[name].to(part.stored_as(work.dtype))


def _values(layout: FileLayout) -> int:
    """Bytes of a file's tensors."""
    return layout.size - len(layout.header)


def _finish(
    folder: Path,
    files: Mapping[str, list[str]],
    total: int,
    source: Path,
    dtype: torch.dtype,
    shape: ModelShape,
) -> None:
    """Config with the type of the weights, tokenizer, carried tensors and index.

    total: bytes of all other tensors.
    """
    copy_companions(source, folder, dtype)
    carried = copy_carried(source, folder, shape)
    if list(files) == [SINGLE] and not carried:
        return
    weight_map = {name: file for file, names in files.items() for name in names} | dict.fromkeys(
        carried, CARRIED
    )
    total += sum(carried.values())
    text = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        indent=2,
    )
    (folder / INDEX).write_text(text + "\n")
