"""How the files of a checkpoint store a tensor: as it is, or quantised, in several tensors.

A quantised tensor is read as bfloat16 under one name; what it is stored as has no names of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megatron_gspo.models import mxfp4, packed_int4
from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.model_shape import ModelError
from megatron_gspo.models.quantization.formats import BLOCK, dequantize_blocks

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_BFLOAT16 = "BF16"  # safetensors' name
_FP8 = "F8_E4M3"


def quantization_settings(config: HFConfig) -> Any:
    """What a config.json says of how its weights are quantised; empty where it says nothing."""
    return next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), {})


@dataclass(frozen=True)
class Region:
    """A part of a tensor: ``[start, stop)`` along ``dim`` (0 or 1; None: all of it) of slice
    ``index`` along a first dimension before these (None: there is none)."""

    dim: int | None = None
    start: int = 0
    stop: int | None = None
    index: int | None = None

    def of(self, stored: Any) -> Tensor:
        """The region of a tensor in a file, reading no more."""
        along = slice(self.start, self.stop)
        inner = () if self.dim is None else (slice(None),) * self.dim + (along,)
        if self.index is not None:
            return stored[(self.index, *inner)] if inner else stored[self.index]
        return stored[inner] if inner else stored[:]

    def along(self, dim: int) -> slice:
        """The range along one of the dimensions."""
        return slice(self.start, self.stop) if self.dim == dim else slice(None)


class TensorFiles(Protocol):
    """The tensors of a checkpoint's files."""

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of it."""

    def stored(self, name: str) -> Any:
        """safetensors' slice of a tensor in a file, with its sizes and type."""


class StoredFormat(Protocol):
    """A way to store a tensor ``name``."""

    ends: ClassVar[tuple[str, ...]]
    """What the tensors in the files have after its name."""

    def read_type(self, files: TensorFiles, name: str) -> str:
        """The type that it is read as, by safetensors' name."""

    def sizes(self, files: TensorFiles, name: str) -> list[int]:
        """Its sizes."""

    def check(self, files: TensorFiles, name: str) -> None:
        """Raise ``ModelError`` where what it is stored as doesn't fit together."""

    def read(self, files: TensorFiles, name: str, region: Region) -> Tensor:
        """The values of a region, in the type that it is read as."""


class AsItIs:
    """Without quantisation."""

    ends: ClassVar[tuple[str, ...]] = ("",)

    def read_type(self, files: TensorFiles, name: str) -> str:
        return str(files.stored(name).get_dtype())

    def sizes(self, files: TensorFiles, name: str) -> list[int]:
        return list(files.stored(name).get_shape())

    def check(self, files: TensorFiles, name: str) -> None:
        pass

    def read(self, files: TensorFiles, name: str, region: Region) -> Tensor:
        return region.of(files.stored(name))


class BlockFP8(AsItIs):
    """Eight bits with a scale for each block of rows and columns (DeepSeek-V3)."""

    ends: ClassVar[tuple[str, ...]] = ("", "_scale_inv")

    def read_type(self, files: TensorFiles, name: str) -> str:
        stored = super().read_type(files, name)
        return _BFLOAT16 if stored == _FP8 else stored

    def check(self, files: TensorFiles, name: str) -> None:
        sizes = self.sizes(files, name)
        scales = name + self.ends[1]
        stored = files.stored(scales).get_shape()
        block = self._block(files)
        blocks = [-(-size // length) for size, length in zip(sizes, block, strict=False)]
        if len(sizes) != 2 or stored != blocks:
            raise ModelError(
                f"{scales} is {tuple(stored)} in the checkpoint; {name} of {tuple(sizes)} in blocks"
                f" of {block} has scales of {tuple(blocks)}"
            )

    def read(self, files: TensorFiles, name: str, region: Region) -> Tensor:
        values = super().read(files, name, region)
        if values.dtype != torch.float8_e4m3fn:
            return values
        scales = files.stored(name + self.ends[1])[:]
        firsts = (region.along(0).start or 0, region.along(1).start or 0)
        block = self._block(files)
        return dequantize_blocks(values, scales, firsts=firsts, block=block).bfloat16()

    def _block(self, files: TensorFiles) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        size = files.quantization.get("weight_block_size")
        if not size:
            return BLOCK
        if (
            not isinstance(size, list)
            or len(size) != 2
            or not all(type(length) is int and length > 0 for length in size)
        ):
            raise ModelError(
                f"weight_block_size={shown(size)} in config.json is not supported; give two sizes"
            )
        return size[0], size[1]


class MXFP4(AsItIs):
    """Four bits (gpt-oss); published models store the transpose, so that the rows of the blocks are
    the last dimension."""

    ends: ClassVar[tuple[str, ...]] = (mxfp4.BLOCKS, mxfp4.SCALES)

    def read_type(self, files: TensorFiles, name: str) -> str:
        return _BFLOAT16

    def sizes(self, files: TensorFiles, name: str) -> list[int]:
        *outer, rows, blocks, size = files.stored(name + mxfp4.BLOCKS).get_shape()
        return [*outer, blocks * size * 2, rows]

    def read(self, files: TensorFiles, name: str, region: Region) -> Tensor:
        first = slice(None) if region.index is None else region.index
        blocks, scales = (
            files.stored(name + end)[first, region.along(1)] for end in (mxfp4.BLOCKS, mxfp4.SCALES)
        )
        values = mxfp4.dequantized(blocks, scales).transpose(-1, -2)
        return values[region.along(0)] if region.dim == 0 else values


class PackedInt4(AsItIs):
    """Four bits of compressed-tensors (Kimi-K2.5)."""

    ends: ClassVar[tuple[str, ...]] = (packed_int4.PACKED, packed_int4.SCALE, packed_int4.SHAPE)

    def read_type(self, files: TensorFiles, name: str) -> str:
        return _BFLOAT16

    def sizes(self, files: TensorFiles, name: str) -> list[int]:
        *outer, words = files.stored(name + packed_int4.PACKED).get_shape()
        return [*outer, words * packed_int4.PER_WORD]

    def check(self, files: TensorFiles, name: str) -> None:
        words = files.stored(name + packed_int4.PACKED)
        if words.get_dtype() != "I32":
            raise ModelError(
                f"{name + packed_int4.PACKED} is stored as {words.get_dtype()}, not as I32;"
                " download it again"
            )
        sizes = self.sizes(files, name)
        scales = name + packed_int4.SCALE
        stored = files.stored(scales).get_shape()
        group = self._group(files)
        if len(sizes) != 2 or sizes[1] % group or stored != [sizes[0], sizes[1] // group]:
            raise ModelError(
                f"{scales} is {tuple(stored)} in the checkpoint; {name} of {tuple(sizes)} in groups"
                f" of {group} columns has a scale for each"
            )

    def read(self, files: TensorFiles, name: str, region: Region) -> Tensor:
        rows = region.along(0)
        columns = region.along(1)
        group = self._group(files)
        start, stop, _ = columns.indices(self.sizes(files, name)[1])
        first = start // group
        last = -(-stop // group)  # whole groups are read
        words = slice(first * group // packed_int4.PER_WORD, last * group // packed_int4.PER_WORD)
        values = packed_int4.dequantized(
            files.stored(name + packed_int4.PACKED)[rows, words],
            files.stored(name + packed_int4.SCALE)[rows, first:last],
        )
        return values[:, start - first * group : stop - first * group]

    def _group(self, files: TensorFiles) -> int:
        size = packed_int4.group_size(files.quantization)
        if size is None:
            raise ModelError(
                "quantization_config in config.json is not that of INT4 with a scale for each group"
            )
        return size


AS_IT_IS: StoredFormat = AsItIs()
_QUANTIZED: tuple[StoredFormat, ...] = (BlockFP8(), MXFP4(), PackedInt4())


def formats_of(names: Collection[str]) -> dict[str, StoredFormat]:
    """The tensors that are stored as tensors of these names, and how each is stored."""
    formats: dict[str, StoredFormat] = {}
    for stored_format in _QUANTIZED:
        last = stored_format.ends[-1]
        for stored in names:
            name = stored.removesuffix(last)
            if stored.endswith(last) and all(name + end in names for end in stored_format.ends):
                formats[name] = stored_format
    parts = {name + end for name, stored_format in formats.items() for end in stored_format.ends}
    return {name: AS_IT_IS for name in names if name not in parts} | formats
