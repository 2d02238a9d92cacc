"""LoRA adapters alone, in PEFT's format, to servers that add them to the base model that they
have loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from megatron_gspo.given_names import files_named
from megatron_gspo.models.peft_files import (
    NAME_PREFIX,
    AdapterFacts,
    adapter_config,
    write_adapters,
)
from megatron_gspo.servers.http_client import ServerClient
from megatron_gspo.weight_transport.buckets import Bucket, buckets
from megatron_gspo.weight_transport.disk_transport import INDEX, DiskTransport
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.sglang_payload import by_value
from megatron_gspo.weight_transport.transport import Sent, WeightTransport

_FOLDER = "adapters"  # within what is published
_TAKES_NONE = (
    "takes no LoRA adapters; start it with --enable-lora, or set lora.weight_updates to merged"
)


class AdapterFileTransport(DiskTransport):
    """Like `DiskTransport`, with the adapters in place of the weights.

    Every source writes its own; rank 0 joins them into the one file that servers read. Memory of
    rank 0: all adapters, twice.
    """

    def __init__(self, endpoints: WeightEndpoints, directory: Path, facts: AdapterFacts) -> None:
        super().__init__(endpoints, directory)
        self._facts = facts

    def unsupported(self, info: ServerInfo) -> str:
        """A server must have been started with adapters."""
        return "" if info.adapters else _TAKES_NONE

    def complete(self, folder: Path) -> None:
        """Join the sources' files, in PEFT's format, experts one by one."""
        files = sorted(files_named(folder, r"model-[0-9]+-[0-9]+\.safetensors"))
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= load_file(file)
        write_adapters(folder / _FOLDER, tensors, self._facts, fused=False)
        for file in (*files, folder / INDEX):
            file.unlink()

    async def load(self, server: ServerClient, timeout: float) -> None:
        """See `WeightTransport.load`."""
        assert self.checkpoint is not None
        await self.endpoints.load_adapters(server, self.checkpoint / _FOLDER, timeout=timeout)


class AdapterTensorTransport(WeightTransport):
    """Adapters by value in one request, which is how servers take them: rank 0 sends those of all
    ranks.

    The request has one copy for each of a server's tensor-parallel ranks. Memory of rank 0: all
    adapters, twice.
    """

    needs_session = False

    def __init__(self, endpoints: WeightEndpoints, facts: AdapterFacts) -> None:
        super().__init__(endpoints)
        self._facts = facts
        self._tensors: dict[str, Tensor] = {}

    def unsupported(self, info: ServerInfo) -> str:
        """A server must have been started with adapters, and take them in a request."""
        if not info.adapters:
            return _TAKES_NONE
        if not info.adapter_tensors:
            engine = self.endpoints.engine
            return (
                f"is {engine} {info.version}, which takes no adapters in a request; set "
                f"{engine}.weight_transport to disk"
            )
        return super().unsupported(info)

    def begin(self, version: str, source_number: int) -> None:
        """See `WeightTransport.begin`."""
        self._tensors = {}

    def store(self, bucket: Bucket) -> None:
        """Keep the bucket's tensors."""
        self._tensors |= {name: tensor.clone() for name, tensor in bucket.tensors()}

    async def finish(self, timeout: float) -> Sent:
        """Send all that was kept."""
        if self.targets:
            config = adapter_config(self._tensors, self._facts, fused=False)
            whole = sum(tensor.nbytes for tensor in self._tensors.values())
            # All have one type, so none begins another bucket.
            [bucket] = buckets(self._named(), whole)
            payload = by_value(bucket)
            await self.on_each(
                lambda target: self.endpoints.load_adapter_payloads(
                    target.client, config, [payload] * target.info.tp_size, timeout=timeout
                )
            )
        return await super().finish(timeout)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """The kept tensors under the names of a file, each forgotten as it is read."""
        while self._tensors:
            name = next(iter(self._tensors))
            yield f"{NAME_PREFIX}{name}", self._tensors.pop(name)
