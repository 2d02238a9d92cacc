"""Hugging Face checkpoint files: read slices of safetensors shards, write shards and index atomically."""

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
from megatron_gspo.models.model_shape import ModelError, read_config, read_json
from megatron_gspo.models.mxfp4 import BLOCKS, SCALES, dequantized
from megatron_gspo.models.quantization.formats import dequantize_blocks
from megatron_gspo.models.stacked_experts import tensor_of

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SCALE = "_scale_inv"  # of a tensor in 8 bits, at the end of its name
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 4 << 30
# files of a model other than its weights, copied to an export unchanged
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*preprocessor_config.json",  # of images and videos
)


class CheckpointReader:
    """The tensors of a Hugging Face directory by name, read lazily and by slice; a context manager.

    Tensors in 8 bits with a scale for each block (DeepSeek-V3's ``weight_scale_inv``) and in MXFP4 (gpt-oss) are read
    as bfloat16; the scales have no names of their own. ``name[i]`` is slice i of a tensor (``stacked_experts.py``).

    Raises ``ModelError`` naming the file that is missing or damaged, or the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[str, Any] = {}
        if (self.path / INDEX).is_file():
            self._files = read_index(self.path)
        elif (self.path / SINGLE).is_file():
            self._files = dict.fromkeys(self._shard(SINGLE, "all tensors").keys(), SINGLE)
        else:
            raise ModelError(
                f"model.path={path}: neither {SINGLE} nor {INDEX} there; give a safetensors checkpoint"
            )

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, by name."""
        return [self.path / file for file in sorted(set(self._files.values()))]

    @property
    def names(self) -> set[str]:
        found = {name for name in self._files if name.removesuffix(_SCALE) not in self._files or not _is_scale(name)}
        quantized = {name.removesuffix(BLOCKS) for name in found if self._is_mxfp4(name.removesuffix(BLOCKS))}
        return quantized | found - {name + end for name in quantized for end in (BLOCKS, SCALES)}

    def _is_mxfp4(self, name: str) -> bool:
        return name + BLOCKS in self._files and name + SCALES in self._files

    @cached_property
    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        settings = read_config(self.path).get("quantization_config") or {}
        rows, columns = settings.get("weight_block_size") or (128, 128)
        return rows, columns

    def _kind(self, name: str) -> str:
        """The type that a tensor is read as, by the name that safetensors has for it."""
        if self._is_mxfp4(name):
            return "BF16"
        kind = self._file(name).get_slice(name).get_dtype()
        return "BF16" if kind == "F8_E4M3" and name + _SCALE in self._files else kind

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise ModelError(f"{self.path}: no tensor {name}")
        return self._shard(self._files[name], name)

    def _shard(self, shard: str, holds: str) -> Any:
        if shard not in self._open:
            file = self.path / shard
            if not file.is_file():
                raise ModelError(f"{file}: this shard is missing; it holds {holds}; download it again")
            try:
                self._open[shard] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: damaged or cut short ({first_line(error)}); download it again") from None
        return self._open[shard]

    def check(self) -> None:
        """Open every shard and read its header: all there, whole, with the tensors of the index, in a float type."""
        held = {shard: set(self._shard(shard, name).keys()) for name, shard in self._files.items()}
        for name, shard in self._files.items():
            if name not in held[shard]:
                raise ModelError(f"{self.path / shard}: lacks {name}, which {INDEX} places there; download it again")
        for name in self.names:
            kind = self._kind(name)
            if kind not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise ModelError(f"{name} is stored as {kind}; use a checkpoint that isn't quantised ({known})")

    def common_dtype(self, but: Collection[str] = ()) -> torch.dtype:
        """The type of all tensors ``but`` these; ``ModelError`` naming two that differ."""
        kinds: dict[str, str] = {}
        for name in sorted(self.names.difference(but)):
            kinds.setdefault(self._kind(name), name)
        if len(kinds) > 1:
            (a, first), (b, second) = list(kinds.items())[:2]
            raise ModelError(f"{first} is {a} and {second} {b} in {self.path}; choose one with --dtype")
        return _DTYPES[next(iter(kinds))]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's sizes."""
        name, index = tensor_of(name)
        if self._is_mxfp4(name):
            *outer, rows, blocks, size = self._file(name + BLOCKS).get_slice(name + BLOCKS).get_shape()
            found = [*outer, blocks * size * 2, rows]
        else:
            found = self._file(name).get_slice(name).get_shape()
        return tuple(found if index is None else found[1:])

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor, or its part ``[start, stop)`` along ``dim`` (0 or 1); only that part is read."""
        name, index = tensor_of(name)
        if self._is_mxfp4(name):
            return self._read_mxfp4(name, index, (dim, start, stop))
        part = self._file(name).get_slice(name)
        if index is not None:
            own = slice(start, stop)
            found = part[index, own] if dim == 0 else part[index, :, own] if dim == 1 else part[index]
        elif dim is None:
            found = part[:]
        else:
            found = part[start:stop] if dim == 0 else part[:, start:stop]
        if found.dtype != torch.float8_e4m3fn or name + _SCALE not in self._files:
            return found
        scales = self._file(name + _SCALE).get_tensor(name + _SCALE)
        firsts = (start if dim == 0 else 0, start if dim == 1 else 0)
        return dequantize_blocks(found, scales, firsts=firsts, block=self._block).bfloat16()

    def _read_mxfp4(self, name: str, index: int | None, part: tuple[int | None, int, int | None]) -> Tensor:
        """Published models store its transpose: the rows of the blocks are the last dimension here."""
        dim, start, stop = part
        own = slice(start, stop) if dim == 1 else slice(None)
        both = []
        for end in (BLOCKS, SCALES):
            stored = self._file(name + end).get_slice(name + end)
            both.append(stored[:, own] if index is None else stored[index, own])
        found = dequantized(*both).transpose(-1, -2)
        return found[start:stop] if dim == 0 else found


def _is_scale(name: str) -> bool:
    return name.endswith(_SCALE)


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file, of a directory that has an index.

    Raises ``ModelError`` where it names anything but files in its directory: an index is downloaded, and a conversion
    back writes files of these names.
    """
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{folder / INDEX}: has no weight_map of tensors to files; download it again")
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
    """Write a Hugging Face checkpoint from a stream of (name, tensor); config and tokenizer come from ``source``.

    quantization: the config's ``quantization_config``. Memory: one shard. Atomic: everything is written to a temporary
    directory, which is renamed at the end; an existing ``path`` is replaced. Returns ``path``. Raises ``DiskError``
    where it cannot be written.
    """
    begin_checkpoint(path)
    write_part(path, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return publish_checkpoint(path, source=source, quantization=quantization)


def begin_checkpoint(path: str | Path) -> None:
    """Make the temporary directory of `write_part`; what an interrupted writer has left there is removed."""
    with writing(path):
        for left in folders_named(Path(path).parent, _replaced_name(path, RANDOM_END)):
            shutil.rmtree(left, ignore_errors=True)
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
    """Write one process's tensors of a checkpoint. Parts are written at the same time, after `begin_checkpoint`.

    part: its number. Memory: one shard. Raises ``DiskError``.
    """
    folder = _partial(path)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total, size, written = 0, 0, Counter[torch.dtype]()

    def take() -> None:
        if pending:
            _write_shard(folder / _shard_name(part, len(shards)), pending)
            shards.append(list(pending))
            pending.clear()

    with writing(path):
        for name, tensor in tensors:
            value = tensor.detach().to("cpu", dtype).contiguous().clone()
            written[value.dtype] += value.nbytes if value.element_size() > 1 else 0  # of weights that aren't quantised
            if size + value.nbytes > max_shard_bytes:
                take()
                size = 0
            pending[name] = value
            size += value.nbytes
            total += value.nbytes
        take()
        most = str(written.most_common(1)[0][0]).removeprefix("torch.") if written else None
        found = {"shards": shards, "bytes": total, "dtype": most}
        (folder / _part_name(part)).write_text(json.dumps(found))


def publish_checkpoint(path: str | Path, *, source: str | Path, parts: int = 1,
                       quantization: dict[str, Any] | None = None) -> Path:  # fmt: skip
    """Complete a checkpoint of so many parts, all of which are written, and rename it. Returns ``path``.

    quantization: see `write_checkpoint`.

    Raises ``DiskError`` where it cannot be written, or for a part that is not there.
    """
    final, partial = Path(path), _partial(path)
    with writing(path):
        found = []
        for part in range(parts):
            if not (partial / _part_name(part)).is_file():
                raise DiskError(f"{path}: part {part + 1} of {parts} is not there; ranks on all nodes write to it: "
                                "choose a run_dir on a shared file system")  # fmt: skip
            found.append(json.loads((partial / _part_name(part)).read_text()))
            (partial / _part_name(part)).unlink()
        shards = [(_shard_name(part, number), names) for part, each in enumerate(found)
                  for number, names in enumerate(each["shards"])]  # fmt: skip
        _finish_names(partial, shards, sum(each["bytes"] for each in found))
        written = next((each["dtype"] for each in found if each["dtype"]), None)
        copy_companions(source, partial, written and getattr(torch, written), quantization)
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
    """Of the directory that a new one replaces, while it is removed; its user may have an `hf.old`."""
    return f".replaced_{Path(path).name}_{end}"


def _part_name(part: int) -> str:
    return f"part-{part:05d}.json"


def _shard_name(part: int, number: int) -> str:
    return f"shard-{part:05d}-{number:05d}"


def copy_companions(source: str | Path, target: str | Path, dtype: torch.dtype | None = None,
                    quantization: dict[str, Any] | None = None) -> None:  # fmt: skip
    """Copy config, tokenizer and chat template of one model directory to another, whose config then names ``dtype``,
    which what loads the weights casts them to, and ``quantization`` or none. dtype None: the config is unchanged."""
    for pattern in _COMPANIONS:
        for file in Path(source).glob(pattern):
            shutil.copyfile(file, Path(target) / file.name)  # without its mode: a source may be read-only
    if dtype is None:
        return
    config = read_json(Path(target) / "config.json")
    changed = _with_dtype(config, str(dtype).removeprefix("torch."))
    changed.pop("quantization_config", None)
    if quantization is not None:
        changed["quantization_config"] = quantization
    if changed != config:
        (Path(target) / "config.json").write_text(json.dumps(changed, indent=2) + "\n")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with this type where it names the language model's, at its top or in ``text_config``."""
    text, keys = config.get("text_config"), {"torch_dtype", "dtype"}
    changed = config | dict.fromkeys(keys & config.keys(), dtype)
    if isinstance(text, dict) and keys & text.keys():
        return changed | {"text_config": text | dict.fromkeys(keys & text.keys(), dtype)}
    return changed if keys & config.keys() else changed | {"dtype": dtype}


def _write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    needed = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with writing(file, needed=needed):
            save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # the system's error as text: "... (os error 28)"
        number_of = re.search(r"os error (\d+)", str(error))
        code = int(number_of[1]) if number_of else errno.EIO
        raise DiskError(describe_disk(file, OSError(code, os.strerror(code)), needed=needed)) from error


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
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
