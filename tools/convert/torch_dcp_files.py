"""Megatron's distributed checkpoints on disk, in the format of torch.distributed.checkpoint, chunk
by chunk.

Torch's own writer and reader are used. In addition, tensors are created one at a time while a file
is written, and only the format's own classes are unpickled.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megatron_gspo.errors import DiskError, describe_disk, first_line, writing
from megatron_gspo.mcore.checkpoint.metadata_file import METADATA, read_metadata
from megatron_gspo.models.model_shape import ModelError
from megatron_gspo.models.parameter_slices import CheckpointChunk

# Position of a chunk or an object: (key, offsets or None, file, start, length in bytes). JSON-able.
Placement = tuple[str, list[int] | None, str, int, int]


def write_file(
    folder: Path,
    number: int,
    chunks: Sequence[CheckpointChunk],
    make: Callable[[CheckpointChunk], Tensor],
    dtype: torch.dtype,
    objects: dict[str, bytes] | None = None,
) -> list[Placement]:
    """Write file ``number`` of a checkpoint with these chunks and objects, and flush it to the
    disk.

    make: called for each chunk when it is written; the result is cast to ``dtype``, or what its
    parameter is stored as instead. Returns the positions. Raises
    ``DiskError`` if the disk is full or fails.
    """
    by_place = {(chunk.key, torch.Size(chunk.offsets)): chunk for chunk in chunks}
    items = [_item(chunk, dtype) for chunk in chunks]
    items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects or {}]

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
            index = write_item.index
            if write_item.type is WriteItemType.BYTE_IO:
                return io.BytesIO((objects or {})[index.fqn])
            assert index.offset is not None
            chunk = by_place[index.fqn, index.offset]
            return make(chunk).to(chunk.part.stored_as(dtype))

    # no copying ahead: on a GPU machine it would initialise CUDA in a forked process
    writer = FileSystemWriter(
        folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0
    )
    plan = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
    results = _written(writer, plan, Planner(), folder / f"__{number}_0.distcp")
    return [
        (
            result.index.fqn,
            None if result.index.offset is None else list(result.index.offset),
            result.storage_data.relative_path,
            result.storage_data.offset,
            result.storage_data.length,
        )
        for result in results
    ]


def _written(
    writer: FileSystemWriter, plan: SavePlan, planner: DefaultSavePlanner, file: Path
) -> list[WriteResult]:
    try:
        with writing(file):
            return writer.write_data(plan, planner).wait()
    except RuntimeError as error:  # torch's zip writer raises it while it handles the failed write
        if not isinstance(error.__context__, OSError):
            raise
        raise DiskError(describe_disk(file, error.__context__)) from error


def write_metadata(
    folder: Path,
    chunks: Iterable[CheckpointChunk],
    dtype: torch.dtype,
    objects: Iterable[str],
    placements: Iterable[Placement],
) -> None:
    """Complete a checkpoint of files written by ``write_file``.

    Raises ``ValueError`` if the chunks of a tensor leave a gap or overlap, or if one was never
    written.
    """
    chunks = list(chunks)
    stored = Counter[str]()
    for chunk in chunks:
        stored[chunk.key] += chunk.numel
    # torch checks for overlaps, and in some versions for gaps only with several plans
    if incomplete := sorted(
        chunk.key for chunk in chunks if stored[chunk.key] != math.prod(chunk.whole)
    ):
        raise ValueError(f"the chunks of {incomplete[0]} leave a gap or overlap")
    items = [_item(chunk, dtype) for chunk in chunks]
    items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan([SavePlan(items)])
    results = []
    for key, offsets, file, start, length in placements:
        index = MetadataIndex(key, None if offsets is None else torch.Size(offsets))
        results.append(WriteResult(index, length, _StorageInfo(file, start, length)))
    if unwritten := {item.index for item in items} - {result.index for result in results}:
        raise ValueError(
            f"{len(unwritten)} chunks were never written, {min(index.fqn for index in unwritten)}"
            " first"
        )
    FileSystemWriter(folder).finish(metadata, [results])


def _item(chunk: CheckpointChunk, dtype: torch.dtype) -> WriteItem:
    offsets = torch.Size(chunk.offsets)
    sizes = torch.Size(chunk.sizes)
    properties = TensorProperties(chunk.part.stored_as(dtype))
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), properties, torch.Size(chunk.whole)
    )
    return WriteItem(MetadataIndex(chunk.key, offsets), WriteItemType.SHARD, tensor_data=data)


class DistributedReader:
    """Reads regions of the tensors of a distributed checkpoint.

    Raises ``ModelError`` that names the file or tensor which is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / METADATA).is_file():
            raise ModelError(
                f"{path}: no {METADATA} there; give a distributed checkpoint, or a run that has one"
            )
        self._reader = FileSystemReader(self.path)
        metadata = read_metadata(self.path / METADATA)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata.items()
        self._tensors = {
            key: value for key, value in entries if isinstance(value, TensorStorageMetadata)
        }

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Key -> sizes of the whole tensor."""
        return {key: tuple(value.size) for key, value in self._tensors.items()}

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def check(self, keys: Collection[str]) -> None:
        """Raise ``ModelError`` unless the files of these tensors exist and have at least the
        size in the metadata.
        """
        needed: dict[str, int] = {}
        for index, position in self._reader.storage_data.items():
            if index.fqn in keys:
                part = str(position.relative_path)
                needed[part] = max(needed.get(part, 0), position.offset + position.length)
        for name, size in sorted(needed.items()):
            file = self.path / name
            if not file.is_file():
                raise ModelError(
                    f"{file}: this file of the checkpoint is missing; copy or save it again"
                )
            if (actual := file.stat().st_size) < size:
                raise ModelError(
                    f"{file}: cut short, {actual} of {size} bytes or more; copy or save it again"
                )

    def read_into(self, target: Tensor, chunk: CheckpointChunk) -> None:
        """Read the chunk's region into its elements of ``target``, a parameter.

        It may be saved in other chunks.
        """
        region = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        items = create_read_items_for_chunk_list(chunk.key, self._tensors[chunk.key], [region])
        if sum(item.lengths.numel() for item in items) != chunk.numel:
            raise ModelError(f"{self.path}: the chunks of {chunk.key} leave a gap; save it again")
        view = chunk.view_in(target)

        class Planner(DefaultLoadPlanner):
            def lookup_tensor(self, index: MetadataIndex) -> Tensor:
                return view

        try:
            self._reader.read_data(LoadPlan(items), Planner()).wait()
        except (
            OSError,
            RuntimeError,
            EOFError,
            KeyError,
            pickle.UnpicklingError,
            AssertionError,
        ) as error:
            files = ", ".join(sorted({self._file(item) for item in items}))
            raise ModelError(
                f"{self.path}: {chunk.key} can't be read from {files} ({first_line(error)})"
            ) from None

    def _file(self, item: ReadItem) -> str:
        return str(self._reader.storage_data[item.storage_index].relative_path)


def open_checkpoint(path: Path) -> DistributedReader:
    """A reader of ``path``, cached until the checkpoint changes: reading the metadata is slow."""
    file = path / METADATA
    return _reader(path, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=1)
def _reader(path: Path, changed: int) -> DistributedReader:
    return DistributedReader(path)
