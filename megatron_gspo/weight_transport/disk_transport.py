"""Weights in a Hugging Face checkpoint that the servers load."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_gspo.errors import writing
from megatron_gspo.servers.http_client import ServerClient
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.transport import WeightTransport

INDEX = "model.safetensors.index.json"
_PREFIX, _UNFINISHED = "weights-", ".unfinished-"
_COMPANIONS = ("config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt",
               "special_tokens_map.json", "added_tokens.json", "chat_template*")  # fmt: skip
# https://github.com/huggingface/safetensors: names of element types in a file's header
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
          torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip


class DiskTransport(WeightTransport):
    """Every bucket becomes a safetensors file of a checkpoint in `directory`, which the servers load when it is whole.

    Servers generate while it is written and pause only to load it. A checkpoint is renamed to its name when it is
    complete, with its index and the other files of `source`, and is kept until the next one is complete: a server that
    returns can be started from `checkpoint`, and the disk needs space for two. Memory: the buffer.
    """

    stores = True
    needs_session = False

    def __init__(self, endpoints: WeightEndpoints, directory: Path, *, source: Path | None = None) -> None:
        super().__init__(endpoints)
        self._directory, self._source = directory.absolute(), source  # a server has another working directory
        self.checkpoint: Path | None = None  # the newest complete one
        self._unfinished = self._directory
        self._weight_map: dict[str, str] = {}
        self._total, self._files = 0, 0

    def unsupported(self, info: ServerInfo) -> str:
        """Every server can load a checkpoint."""
        return ""

    def begin(self, version: str) -> None:
        """Remove what an interrupted update has left."""
        name = re.sub(r"[^0-9A-Za-z._-]", "-", version)
        self._weight_map, self._total, self._files = {}, 0, 0
        self._unfinished = self._directory / (_UNFINISHED + name)
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            for left in self._directory.glob(_UNFINISHED + "*"):
                shutil.rmtree(left)
            self._unfinished.mkdir()

    def take(self, bucket: Bucket) -> None:
        """Write a file."""
        self._files += 1
        name = f"model-{self._files:05d}.safetensors"
        with writing(self._unfinished / name, needed=bucket.nbytes):
            _write(self._unfinished / name, bucket)
        self._weight_map |= {entry.name: name for entry in bucket.entries}
        self._total += bucket.nbytes

    def end(self) -> None:
        """Write the index, rename the checkpoint, remove the one before."""
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        whole = self._directory / self._unfinished.name.replace(_UNFINISHED, _PREFIX, 1)
        with writing(whole):
            (self._unfinished / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            if self._source is not None:
                for file in (file for pattern in _COMPANIONS for file in self._source.glob(pattern)):
                    shutil.copyfile(file, self._unfinished / file.name)
            if whole.exists():
                shutil.rmtree(whole)
            os.rename(self._unfinished, whole)
            for old in self._directory.glob(_PREFIX + "*"):
                if old != whole:
                    shutil.rmtree(old)
        self.checkpoint = whole

    async def finish(self, server: ServerClient, timeout: float) -> None:
        """See `WeightTransport.finish`."""
        assert self.checkpoint is not None
        await self.endpoints.load_checkpoint(server, self.checkpoint, timeout=timeout)


def _write(file: Path, bucket: Bucket) -> None:
    """A safetensors file of a CPU bucket: 8 bytes with the header's size, the header (JSON), the bucket's bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in bucket.entries:
        if entry.dtype not in _TYPES:
            raise ValueError(f"{entry.name} has {entry.dtype}; safetensors files can't hold it")
        offsets = [entry.start, entry.stop]
        header[entry.name] = {"dtype": _TYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        out.write(bucket.data.numpy().data)
