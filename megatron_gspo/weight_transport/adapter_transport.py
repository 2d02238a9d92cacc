"""LoRA adapters alone, by files in PEFT's format, to servers that add them to the base model that they have loaded."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from megatron_gspo.models.peft_files import AdapterFacts, write_adapters
from megatron_gspo.servers.http_client import ServerClient
from megatron_gspo.weight_transport.disk_transport import DiskTransport
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints

_FOLDER = "adapters"  # within what is published


class AdapterTransport(DiskTransport):
    """As `DiskTransport`, with the adapters in place of the weights.

    Every source writes its own; rank 0 joins them into the one file that servers read. Memory of rank 0: all adapters,
    twice.
    """

    def __init__(self, endpoints: WeightEndpoints, directory: Path, facts: AdapterFacts) -> None:
        super().__init__(endpoints, directory)
        self._facts = facts

    def unsupported(self, info: ServerInfo) -> str:
        """A server must have been started with adapters."""
        if info.adapters:
            return ""
        return "takes no LoRA adapters; start it with --enable-lora, or set lora.weight_updates to merged"

    def complete(self, folder: Path) -> None:
        """Join the sources' files, in PEFT's format, experts one by one."""
        parts = sorted(folder.iterdir())
        tensors = {name: tensor for part in parts if part.suffix == ".safetensors"
                   for name, tensor in load_file(part).items()}  # fmt: skip
        write_adapters(folder / _FOLDER, tensors, self._facts, fused=False)
        for part in parts:
            part.unlink()

    async def load(self, server: ServerClient, timeout: float) -> None:
        """See `WeightTransport.load`."""
        assert self.checkpoint is not None
        await self.endpoints.load_adapters(server, self.checkpoint / _FOLDER, timeout=timeout)
