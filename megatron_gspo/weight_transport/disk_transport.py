"""Weights in a Hugging Face checkpoint that the servers load."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_gspo.errors import DiskError, writing
from megatron_gspo.given_names import RANDOM_END, folders_named, is_real_folder, move_aside
from megatron_gspo.models.hf_checkpoint import copy_companions
from megatron_gspo.models.model_shape import read_json
from megatron_gspo.servers.http_client import ServerClient
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.transport import Sent, WeightTransport

INDEX = "model.safetensors.index.json"
_PREFIX = "weights-"
_UNFINISHED = ".unfinished-"
_VERSION = f"{RANDOM_END}-[0-9]+"  # of a folder's name: the run that wrote it, and the step
# https://github.com/huggingface/safetensors: names of element types in a file's header
_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DiskTransport(WeightTransport):
    """Every bucket becomes a safetensors file of a checkpoint in `directory`, which the servers
    load when it is whole.

    All sources write at the same time. Servers generate meanwhile and pause only to load. A
    checkpoint is renamed to its name when it is complete, with its index and the other files of
    `source`, and is kept until the next one is complete: a server that returns can be started from
    `checkpoint`, and the disk needs space for two. Memory: the buffer.
    """

    stores = True
    needs_session = False

    def __init__(
        self,
        endpoints: WeightEndpoints,
        directory: Path,
        *,
        source: Path | None = None,
        quantization: dict[str, Any] | None = None,
        checksums: bool = False,
    ) -> None:
        """quantization: the config's `quantization_config`; None: that of `source`."""
        super().__init__(endpoints, checksums=checksums)
        # A server has another working directory.
        self._directory = directory.absolute()
        self._source = source
        self._quantization = quantization
        self.checkpoint: Path | None = None  # the newest complete one, where it was published
        self._unfinished = self._directory
        self._weight_map: dict[str, str] = {}
        self._part = 0
        self._total = 0
        self._files = 0

    def unsupported(self, info: ServerInfo) -> str:
        """Every server can load a checkpoint."""
        return ""

    def prepare(self, version: str) -> None:
        """Remove what an interrupted update has left."""
        self._unfinished = self._place(version)
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            for left in folders_named(self._directory, re.escape(_UNFINISHED) + _VERSION):
                shutil.rmtree(left)
            self._unfinished.mkdir()

    def begin(self, version: str, part: int) -> None:
        """See `WeightTransport.begin`."""
        self._unfinished = self._place(version)
        self._part = part
        self._weight_map = {}
        self._total = 0
        self._files = 0

    def take(self, bucket: Bucket) -> None:
        """Write a file."""
        self._files += 1
        name = f"model-{self._part:05d}-{self._files:05d}.safetensors"
        with writing(self._unfinished / name, needed=bucket.nbytes):
            _write(self._unfinished / name, bucket)
        self._weight_map |= {entry.name: name for entry in bucket.entries}
        self._total += bucket.nbytes

    async def finish(self, timeout: float) -> Sent:
        """Write the part of the index."""
        part = self._unfinished / _part_name(self._part)
        with writing(part):
            part.write_text(json.dumps(_index(self._weight_map, self._total)))
        return Sent()

    def publish(self, parts: int) -> None:
        """Write the index, rename the checkpoint, remove the one before.

        Raises DiskError for a part that lacks.
        """
        weight_map: dict[str, str] = {}
        total = 0
        whole = self._directory / self._unfinished.name.replace(_UNFINISHED, _PREFIX, 1)
        with writing(whole):
            for part in (self._unfinished / _part_name(number) for number in range(parts)):
                if not part.is_file():
                    raise DiskError(
                        f"{part}: not there; ranks on all nodes write to this directory: set "
                        f"{self.endpoints.engine}.weight_dir to one that all nodes share"
                    )
                index = json.loads(part.read_text())
                weight_map |= index["weight_map"]
                total += index["metadata"]["total_size"]
                part.unlink()
            (self._unfinished / INDEX).write_text(
                json.dumps(_index(weight_map, total), indent=2) + "\n"
            )
            self.complete(self._unfinished)
            self._rename(whole)
        self.checkpoint = whole

    def complete(self, folder: Path) -> None:
        """Add the files that a checkpoint has beside its weights."""
        if self._source is not None:
            copy_companions(self._source, folder)
            if self._quantization is not None:
                config = read_json(self._source / "config.json") | {
                    "quantization_config": self._quantization
                }
                (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _rename(self, whole: Path) -> None:
        if is_real_folder(whole):
            shutil.rmtree(whole)
        elif os.path.lexists(whole):
            move_aside(whole)
        os.rename(self._unfinished, whole)
        for old in folders_named(self._directory, _PREFIX + _VERSION):
            if old != whole:
                shutil.rmtree(old)

    async def load(self, server: ServerClient, timeout: float) -> None:
        """See `WeightTransport.load`."""
        assert self.checkpoint is not None
        await self.endpoints.load_checkpoint(server, self.checkpoint, timeout=timeout)

    def _place(self, version: str) -> Path:
        return self._directory / (_UNFINISHED + re.sub(r"[^0-9A-Za-z._-]", "-", version))


def _part_name(part: int) -> str:
    return f"part-{part:05d}.json"


def _index(weight_map: dict[str, str], total: int) -> dict[str, Any]:
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write(file: Path, bucket: Bucket) -> None:
    """A safetensors file of a CPU bucket: 8 bytes with the header's size, the header (JSON),
    the bucket's bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in bucket.entries:
        if entry.dtype not in _TYPES:
            raise ValueError(f"{entry.name} has {entry.dtype}; safetensors files can't hold it")
        offsets = [entry.start, entry.stop]
        header[entry.name] = {
            "dtype": _TYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        out.write(bucket.data.numpy().data)
