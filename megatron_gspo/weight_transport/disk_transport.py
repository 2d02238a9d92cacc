"""Weights in a Hugging Face checkpoint that the servers load."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import torch

from megatron_gspo.errors import DiskError, writing
from megatron_gspo.given_names import RANDOM_END, folders_named, is_real_folder, move_aside
from megatron_gspo.models.hf_checkpoint import copy_companions
from megatron_gspo.models.model_shape import read_json
from megatron_gspo.servers.http_client import JsonObject, ServerClient
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
        quantization: JsonObject | None = None,
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
        self._source_number = 0
        self._total = 0
        self._files = 0

    def unsupported(self, info: ServerInfo) -> str:
        """Every server can load a checkpoint."""
        return ""

    def prepare(self, version: str) -> None:
        """Remove what an interrupted update has left."""
        self._unfinished = self._unfinished_folder(version)
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            for folder in folders_named(self._directory, re.escape(_UNFINISHED) + _VERSION):
                shutil.rmtree(folder)
            self._unfinished.mkdir()

    def begin(self, version: str, source_number: int) -> None:
        """See `WeightTransport.begin`."""
        self._unfinished = self._unfinished_folder(version)
        self._source_number = source_number
        self._weight_map = {}
        self._total = 0
        self._files = 0

    def store(self, bucket: Bucket) -> None:
        """Write a file."""
        self._files += 1
        name = f"model-{self._source_number:05d}-{self._files:05d}.safetensors"
        with writing(self._unfinished / name, needed=bucket.nbytes):
            _write(self._unfinished / name, bucket)
        self._weight_map |= {entry.name: name for entry in bucket.entries}
        self._total += bucket.nbytes

    async def finish(self, timeout: float) -> Sent:
        """Write the index of this source's files."""
        index = self._unfinished / _index_name(self._source_number)
        with writing(index):
            index.write_text(json.dumps(_index(self._weight_map, self._total)))
        return Sent()

    def publish(self, num_sources: int) -> None:
        """Join the sources' indices, rename the checkpoint, remove the one before.

        Raises DiskError where an index lacks.
        """
        weight_map: dict[str, str] = {}
        total = 0
        whole = self._directory / self._unfinished.name.replace(_UNFINISHED, _PREFIX, 1)
        with writing(whole):
            for number in range(num_sources):
                file = self._unfinished / _index_name(number)
                if not file.is_file():
                    raise DiskError(
                        f"{file}: not there; ranks on all nodes write to this directory: set "
                        f"{self.endpoints.engine}.weight_dir to one that all nodes share"
                    )
                index = json.loads(file.read_text())
                weight_map |= index["weight_map"]
                total += index["metadata"]["total_size"]
                file.unlink()
            (self._unfinished / INDEX).write_text(
                json.dumps(_index(weight_map, total), indent=2) + "\n"
            )
            self.complete(self._unfinished)
            self._rename(whole)
        self.checkpoint = whole

    def complete(self, folder: Path) -> None:
        """Add the files that a checkpoint has beside its weights."""
        if self._source is None:
            return
        copy_companions(self._source, folder)
        if self._quantization is not None:
            config = read_json(self._source / "config.json")
            config["quantization_config"] = self._quantization
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

    def _unfinished_folder(self, version: str) -> Path:
        return self._directory / (_UNFINISHED + re.sub(r"[^0-9A-Za-z._-]", "-", version))


def _index_name(source_number: int) -> str:
    return f"part-{source_number:05d}.json"


def _index(weight_map: dict[str, str], total: int) -> JsonObject:
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write(file: Path, bucket: Bucket) -> None:
    """A safetensors file of a CPU bucket: 8 bytes with the header's size, the header (JSON),
    the bucket's bytes.
    """
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    for entry in bucket.entries:
        if entry.dtype not in _TYPES:
            raise ValueError(f"{entry.name} has {entry.dtype}; safetensors files can't hold it")
        header[entry.name] = {
            "dtype": _TYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        out.write(bucket.data.numpy().data)
