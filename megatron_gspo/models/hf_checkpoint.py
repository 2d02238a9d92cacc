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
from megatron_gspo.models.config_defaults import shown
from megatron_gspo.models.model_shape import ModelError, read_config, read_json
from megatron_gspo.models.mxfp4 import BLOCKS, SCALES, dequantized
from megatron_gspo.models.quantization.formats import dequantize_blocks
from megatron_gspo.models.stacked_experts import tensor_of

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SCALE = "_scale_inv"  # of a tensor in 8 bits, at the end of its name
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 4 << 30
_UNREAD = re.compile(r"(.+\.)?rotary_emb\.inv_freq")  # a buffer of older files that no model reads


class CheckpointReader:
    """The tensors of a Hugging Face directory by name, read lazily and by slice; a context manager.

    Tensors in 8 bits with a scale for each block (DeepSeek-V3's ``weight_scale_inv``) and in MXFP4
    (gpt-oss) are read as bfloat16; the scales have no names of their own. ``name[i]`` is slice i of
    a tensor (``stacked_experts.py``).

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
        packed = {
            name
            for name in self._files
            if name.removesuffix(_SCALE) not in self._files or not _is_scale(name)
        }
        quantized = {
            name.removesuffix(BLOCKS)
            for name in packed
            if self._is_mxfp4(name.removesuffix(BLOCKS))
        }
        stored = {name + end for name in quantized for end in (BLOCKS, SCALES)}
        return {name for name in quantized | packed - stored if _UNREAD.fullmatch(name) is None}

    def _is_mxfp4(self, name: str) -> bool:
        return name + BLOCKS in self._files and name + SCALES in self._files

    @cached_property
    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        settings = read_config(self.path).get("quantization_config")
        size: object = None
        if isinstance(settings, dict):
            size = settings.get("weight_block_size")
        if not size:
            return 128, 128
        if (
            not isinstance(size, list)
            or len(size) != 2
            or not all(type(length) is int and length > 0 for length in size)
        ):
            raise ModelError(
                f"weight_block_size={shown(size)} in config.json is not supported; give two sizes"
            )
        return size[0], size[1]

    def _read_type(self, name: str) -> str:
        """The type that a tensor is read as, by the name that safetensors has for it."""
        if self._is_mxfp4(name):
            return "BF16"
        stored = self._file(name).get_slice(name).get_dtype()
        if stored == "F8_E4M3" and name + _SCALE in self._files:
            return "BF16"
        return stored

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
            stored = self._read_type(name)
            if stored not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise ModelError(
                    f"{name} is stored as {stored}; use a checkpoint that isn't quantised ({known})"
                )
            self._check_scales(name)

    def _check_scales(self, name: str) -> None:
        """The scales of a tensor in 8 bits are those of its blocks."""
        if self._is_mxfp4(name) or name + _SCALE not in self._files:
            return
        sizes = self._file(name).get_slice(name).get_shape()
        stored = self._file(name + _SCALE).get_slice(name + _SCALE).get_shape()
        blocks = [-(-size // block) for size, block in zip(sizes, self._block, strict=False)]
        if len(sizes) != 2 or stored != blocks:
            problem = (
                f"is {tuple(stored)} in the checkpoint; {name} of {tuple(sizes)} in blocks of"
                f" {self._block}"
            )
            raise ModelError(f"{name + _SCALE} {problem} has scales of {tuple(blocks)}")

    def common_dtype(self, but: Collection[str] = ()) -> torch.dtype:
        """The type of all tensors ``but`` these; ``ModelError`` naming two that differ."""
        tensor_of_type: dict[str, str] = {}
        for name in sorted(self.names.difference(but)):
            tensor_of_type.setdefault(self._read_type(name), name)
        types = list(tensor_of_type)
        if len(types) > 1:
            first = f"{tensor_of_type[types[0]]} is {types[0]}"
            second = f"{tensor_of_type[types[1]]} {types[1]}"
            raise ModelError(f"{first} and {second} in {self.path}; choose one with --dtype")
        return _DTYPES[types[0]]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's sizes."""
        name, index = tensor_of(name)
        if self._is_mxfp4(name):
            *outer, rows, blocks, size = (
                self._file(name + BLOCKS).get_slice(name + BLOCKS).get_shape()
            )
            stored = [*outer, blocks * size * 2, rows]
        else:
            stored = self._file(name).get_slice(name).get_shape()
        return tuple(stored if index is None else stored[1:])

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """The tensor, or its part ``[start, stop)`` along ``dim`` (0 or 1); only that part is
        read.
        """
        name, index = tensor_of(name)
        if self._is_mxfp4(name):
            return self._read_mxfp4(name, index, dim=dim, start=start, stop=stop)
        stored = self._file(name).get_slice(name)
        region = [slice(None), slice(None)]
        if dim is not None:
            region[dim] = slice(start, stop)
        if index is None:
            values = stored[:] if dim is None else stored[tuple(region[: dim + 1])]
        else:
            values = stored[index] if dim is None else stored[(index, *region[: dim + 1])]
        if values.dtype != torch.float8_e4m3fn or name + _SCALE not in self._files:
            return values
        scales = self._file(name + _SCALE).get_tensor(name + _SCALE)
        firsts = (start if dim == 0 else 0, start if dim == 1 else 0)
        return dequantize_blocks(values, scales, firsts=firsts, block=self._block).bfloat16()

    def _read_mxfp4(
        self, name: str, index: int | None, *, dim: int | None, start: int, stop: int | None
    ) -> Tensor:
        """Published models store its transpose: the rows of the blocks are the last dimension
        here.
        """
        block_rows = slice(start, stop) if dim == 1 else slice(None)

        def stored(end: str) -> Tensor:
            tensor = self._file(name + end).get_slice(name + end)
            return tensor[:, block_rows] if index is None else tensor[index, block_rows]

        values = dequantized(stored(BLOCKS), stored(SCALES)).transpose(-1, -2)
        return values[start:stop] if dim == 0 else values


def _is_scale(name: str) -> bool:
    return name.endswith(_SCALE)


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
    """Of the directory that a new one replaces, while it is removed; its user may have an
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
