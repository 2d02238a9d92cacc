"""Hugging Face checkpoint files: read slices of safetensors shards, write shards and index
atomically.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gspo.errors import DiskError, describe_disk, first_line, writing
from megatron_gspo.given_names import RANDOM_END, folders_named, is_real_folder, move_aside
from megatron_gspo.models.companions import copy_companions
from megatron_gspo.models.model_shape import ModelError, read_config, read_json
from megatron_gspo.models.stacked_experts import tensor_of
from megatron_gspo.models.stored_formats import (
    AS_IT_IS,
    Region,
    StoredFormat,
    formats_of,
    quantization_settings,
)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 4 << 30
_UNREAD = re.compile(r"(.+\.)?rotary_emb\.inv_freq")  # a buffer of older files that no model reads


class CheckpointReader:
    """The tensors of a Hugging Face directory by name, read lazily and by slice; a context manager.

    Quantised tensors are read as bfloat16 (``stored_formats.py``). ``name[i]`` is slice i of a
    tensor (``stacked_experts.py``).

    Raises ``ModelError`` naming the file that is missing or damaged, or the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[str, Any] = {}
        self._files = self._find_files()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()

    def _find_files(self) -> dict[str, str]:
        """Tensor -> file. A single file comes before an index of others, as in Transformers;
        servers read the files of the index, so that both may not be there."""
        single = self.path / SINGLE
        if not (self.path / INDEX).is_file():
            if not single.is_file():
                raise ModelError(
                    f"model.path={self.path}: neither {SINGLE} nor {INDEX} there; give a"
                    " safetensors checkpoint"
                )
            return dict.fromkeys(self._shard(SINGLE, "all tensors").keys(), SINGLE)
        index = read_index(self.path)
        if not single.is_file() or SINGLE in index.values():
            return index
        others = sorted(file for file in set(index.values()) if (self.path / file).is_file())
        if others:
            problem = (
                f"has {SINGLE}, and {INDEX} places the weights in {others[0]}, which is there too"
            )
            raise ModelError(
                f"{self.path}: {problem}; remove {SINGLE} or the index, whichever is of another"
                " model"
            )
        return dict.fromkeys(self._shard(SINGLE, "all tensors").keys(), SINGLE)

    @property
    def has_index(self) -> bool:
        """Whether the files are those of an index."""
        return (self.path / INDEX).is_file() and self._files == read_index(self.path)

    @property
    def stored_names(self) -> set[str]:
        """The names of all tensors in the files, of scales too."""
        return set(self._files)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, by name."""
        return [self.path / file for file in sorted(set(self._files.values()))]

    @property
    def names(self) -> set[str]:
        return {name for name in self._formats if _UNREAD.fullmatch(name) is None}

    @cached_property
    def _formats(self) -> dict[str, StoredFormat]:
        return formats_of(self._files.keys())

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of how the weights are quantised; empty where it says nothing."""
        settings = quantization_settings(read_config(self.path))
        return settings if isinstance(settings, dict) else {}

    def stored(self, name: str) -> Any:
        """safetensors' slice of a tensor in the files."""
        return self._file(name).get_slice(name)

    def _format(self, name: str) -> StoredFormat:
        return self._formats.get(name, AS_IT_IS)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise ModelError(f"{self.path}: no tensor {name}")
        return self._shard(self._files[name], name)

    def _shard(self, shard: str, holds: str) -> Any:
        if shard not in self._open:
            file = self.path / shard
            if not file.is_file():
                raise ModelError(
                    f"{file}: this shard is missing; it holds {holds}; download it again"
                )
            try:
                self._open[shard] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{file}: damaged or cut short ({first_line(error)}); download it again"
                ) from None
        return self._open[shard]

    def check(self) -> None:
        """Open every shard and read its header: all there, whole, with the tensors of the
        index, in a float type.
        """
        held = {shard: set(self._shard(shard, name).keys()) for name, shard in self._files.items()}
        for name, shard in self._files.items():
            if name not in held[shard]:
                raise ModelError(
                    f"{self.path / shard}: lacks {name}, which {INDEX} places there; download it"
                    " again"
                )
        for shard, names in held.items():
            for name in sorted(names):
                if self._files.get(name) != shard and _UNREAD.fullmatch(name) is None:
                    says = "does not list"
                    if name in self._files:
                        says = f"places in {self._files[name]}"
                    problem = f"holds {name}, which {INDEX} {says}"
                    raise ModelError(
                        f"{self.path / shard}: {problem}, and Transformers reads it; download both"
                        " again"
                    )
        for name in self.names:
            stored_format = self._format(name)
            stored = stored_format.read_type(self, name)
            if stored not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise ModelError(
                    f"{name} is stored as {stored}; use a checkpoint that isn't quantised ({known})"
                )
            stored_format.check(self, name)

    def common_dtype(self, but: Collection[str] = ()) -> torch.dtype:
        """The type of all tensors ``but`` these; ``ModelError`` naming two that differ."""
        tensor_of_type: dict[str, str] = {}
        for name in sorted(self.names.difference(but)):
            tensor_of_type.setdefault(self._format(name).read_type(self, name), name)
        types = list(tensor_of_type)
        if len(types) > 1:
            first = f"{tensor_of_type[types[0]]} is {types[0]}"
            second = f"{tensor_of_type[types[1]]} {types[1]}"
            raise ModelError(f"{first} and {second} in {self.path}; choose one with --dtype")
        return _DTYPES[types[0]]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's sizes."""
        name, index = tensor_of(name)
        sizes = self._format(name).sizes(self, name)
        return tuple(sizes if index is None else sizes[1:])

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """The tensor, or its part ``[start, stop)`` along ``dim`` (0 or 1); only that part is
        read.
        """
        name, index = tensor_of(name)
        region = Region(dim, start, stop, index)
        return self._format(name).read(self, name, region)


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file, of a directory that has an index.

    Raises ``ModelError`` where it names anything but files in its directory: an index is
    downloaded, and a conversion back writes files of these names.
    """
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise ModelError(
            f"{folder / INDEX}: has no weight_map of tensors to files; download it again"
        )
    for name, file in weight_map.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            problem = f"places {name} in {file!r}, no safetensors file there"
            raise ModelError(f"{folder / INDEX}: {problem}; download it again")
    return weight_map


def write_checkpoint(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face checkpoint from a stream of (name, tensor); config and tokenizer come
    from ``source``.

    quantization: the config's ``quantization_config``. Memory: one shard. Atomic: everything is
    written to a temporary directory, which is renamed at the end; an existing ``path`` is replaced.
    Returns ``path``. Raises ``DiskError`` where it cannot be written.
    """
    begin_checkpoint(path)
    write_part(path, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return publish_checkpoint(path, source=source, quantization=quantization)


def begin_checkpoint(path: str | Path) -> None:
    """Make the temporary directory of `write_part`; what an interrupted writer has left there
    is removed.
    """
    with writing(path):
        for folder in folders_named(Path(path).parent, _replaced_name(path, RANDOM_END)):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(_partial(path), ignore_errors=True)
        _partial(path).mkdir(parents=True)


def write_part(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    part: int = 0,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write one process's tensors of a checkpoint. Parts are written at the same time, after
    `begin_checkpoint`.

    part: its number. Memory: one shard. Raises ``DiskError``.
    """
    folder = _partial(path)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0
    size = 0
    written = Counter[torch.dtype]()

    def write_pending() -> None:
        if pending:
            _write_shard(folder / _shard_name(part, len(shards)), pending)
            shards.append(list(pending))
            pending.clear()

    with writing(path):
        for name, tensor in tensors:
            value = tensor.detach().to("cpu", dtype).contiguous().clone()
            # Of weights that aren't quantised.
            written[value.dtype] += value.nbytes if value.element_size() > 1 else 0
            if size + value.nbytes > max_shard_bytes:
                write_pending()
                size = 0
            pending[name] = value
            size += value.nbytes
            total += value.nbytes
        write_pending()
        most = str(written.most_common(1)[0][0]).removeprefix("torch.") if written else None
        summary = {"shards": shards, "bytes": total, "dtype": most}
        (folder / _part_name(part)).write_text(json.dumps(summary))


def publish_checkpoint(
    path: str | Path,
    *,
    source: str | Path,
    parts: int = 1,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Complete a checkpoint of so many parts, all of which are written, and rename it. Returns
    ``path``.

    quantization: see `write_checkpoint`.

    Raises ``DiskError`` where it cannot be written, or for a part that is not there.
    """
    final = Path(path)
    partial = _partial(path)
    with writing(path):
        summaries = []
        for part in range(parts):
            if not (partial / _part_name(part)).is_file():
                raise DiskError(
                    f"{path}: part {part + 1} of {parts} is not there; ranks on all nodes write to"
                    " it: choose a run_dir on a shared file system"
                )
            summaries.append(json.loads((partial / _part_name(part)).read_text()))
            (partial / _part_name(part)).unlink()
        shards = []
        for part, summary in enumerate(summaries):
            for number, names in enumerate(summary["shards"]):
                shards.append((_shard_name(part, number), names))
        _finish_names(partial, shards, sum(summary["bytes"] for summary in summaries))
        types = [summary["dtype"] for summary in summaries if summary["dtype"]]
        dtype = getattr(torch, types[0]) if types else None
        copy_companions(source, partial, dtype, quantization)
        replaced = final.with_name(_replaced_name(path, secrets.token_hex(4)))
        if is_real_folder(final):
            os.replace(final, replaced)
        elif os.path.lexists(final):
            move_aside(final)
        os.replace(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def _partial(path: str | Path) -> Path:
    return Path(path).with_name(Path(path).name + ".partial")


def _replaced_name(path: str | Path, end: str) -> str:
    """The name of a replaced directory while it is removed; its user may have an
    `hf.old`.
    """
    return f".replaced_{Path(path).name}_{end}"


def _part_name(part: int) -> str:
    return f"part-{part:05d}.json"


def _shard_name(part: int, number: int) -> str:
    return f"shard-{part:05d}-{number:05d}"


def _write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    needed = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with writing(file, needed=needed):
            save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # the system's error as text: "... (os error 28)"
        number_of = re.search(r"os error (\d+)", str(error))
        code = int(number_of[1]) if number_of else errno.EIO
        raise DiskError(
            describe_disk(file, OSError(code, os.strerror(code)), needed=needed)
        ) from error


def _finish_names(folder: Path, shards: list[tuple[str, list[str]]], total: int) -> None:
    """Give the shards, (file, its tensors), their names, and write the index."""
    if len(shards) == 1:
        os.replace(folder / shards[0][0], folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (shard, names) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / shard, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )
