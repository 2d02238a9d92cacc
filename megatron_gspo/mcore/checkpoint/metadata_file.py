"""`.metadata`: which file of a distributed checkpoint holds which region of which tensor.

The format is torch.distributed.checkpoint's. It is a pickle; only its own classes are read.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_gspo.errors import first_line
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box
from megatron_gspo.models.model_shape import ModelError

METADATA = ".metadata"
_INDEX = "__{}.index"

# Classes that a `.metadata` file may contain: torch's metadata classes, and those of older Megatron
# versions.
_SAFE = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}


@dataclass(frozen=True)
class StoredPart:
    """Where something is stored: a region of a tensor of the sizes ``whole``, or an object if
    ``box`` is None.
    """

    key: str
    file: str
    start: int
    length: int
    box: Box | None = None
    whole: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


def write_metadata_file(folder: Path, parts: Iterable[StoredPart]) -> None:
    """Write ``.metadata``. Raises ``ValueError`` unless the parts cover each element of each
    tensor once.
    """
    tensors: dict[str, list[StoredPart]] = {}
    entries: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    results: dict[MetadataIndex, WriteResult] = {}
    for part in parts:
        index = MetadataIndex(part.key, None if part.box is None else torch.Size(part.box.offsets))
        if index in results:
            raise ValueError(f"two ranks wrote {part.key} at {part.box and part.box.offsets}")
        results[index] = WriteResult(
            index, part.length, _StorageInfo(part.file, part.start, part.length)
        )
        if part.box is None:
            entries[part.key] = BytesStorageMetadata()
        else:
            tensors.setdefault(part.key, []).append(part)
    for key, tensor_parts in tensors.items():
        wholes = {(part.whole, part.dtype) for part in tensor_parts}
        stored = sum(part.box.numel for part in tensor_parts if part.box is not None)
        if len(wholes) > 1 or stored != math.prod(tensor_parts[0].whole):
            raise ValueError(
                f"{key}: {stored} elements are written of"
                f" {' and '.join(str(list(w)) for w, _ in wholes)}"
            )
        chunks = [
            ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
            for part in tensor_parts
            if part.box is not None
        ]
        properties = TensorProperties(tensor_parts[0].dtype or torch.float32)
        entries[key] = TensorStorageMetadata(properties, torch.Size(tensor_parts[0].whole), chunks)
    FileSystemWriter(folder).finish(Metadata(entries), [list(results.values())])


def write_index(folder: Path, rank: int, parts: Iterable[StoredPart]) -> None:
    """Write what a rank's file holds, until `read_index` takes it."""
    fields = [
        [
            part.key,
            part.file,
            part.start,
            part.length,
            part.box and [part.box.offsets, part.box.sizes],
            part.whole,
            part.dtype and str(part.dtype),
        ]
        for part in parts
    ]
    (folder / _INDEX.format(rank)).write_text(json.dumps(fields))


def read_index(folder: Path, rank: int) -> list[StoredPart]:
    """What a rank's file holds; removes the index."""
    file = folder / _INDEX.format(rank)
    parts = []
    for key, name, start, length, box, whole, dtype in json.loads(file.read_text()):
        region = Box(tuple(box[0]), tuple(box[1])) if box else None
        stored_dtype = getattr(torch, dtype.removeprefix("torch.")) if dtype else None
        parts.append(StoredPart(key, name, start, length, region, tuple(whole), stored_dtype))
    file.unlink()
    return parts


def stored_parts(metadata: Metadata) -> dict[str, list[StoredPart]]:
    """Key -> its parts."""
    parts: dict[str, list[StoredPart]] = {}
    for index, info in metadata.storage_data.items():
        parts.setdefault(index.fqn, [])
        if index.offset is None:
            parts[index.fqn].append(
                StoredPart(index.fqn, str(info.relative_path), info.offset, info.length)
            )
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                part = StoredPart(
                    key, str(info.relative_path), info.offset, info.length, box, tuple(entry.size)
                )
                parts[key].append(part)
    return parts


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _SAFE.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(file: Path) -> Metadata:
    """Unpickle a ``.metadata`` file; only torch's metadata classes are allowed.

    Raises ``ModelError`` for a damaged file or any other class.
    """
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except Exception as error:  # a damaged pickle can raise any exception
        raise ModelError(
            f"{file}: not readable as a checkpoint's metadata ({first_line(error)})"
        ) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ModelError(f"{file}: not a checkpoint's metadata, but a {type(metadata).__name__}")
    return metadata
