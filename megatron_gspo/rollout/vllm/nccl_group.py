"""A NCCL communicator of this process and the workers of vLLM servers, for vLLM's own transfer engine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.weight_transport.update_group import GroupError, in_thread

_POLL_SECONDS = 0.002  # between two looks at a broadcast


class NCCLGroup:
    """This process is rank 0, the servers' workers follow. They get `unique_id` over HTTP, so there is no store.

    Each worker does a sum of one element when it joins, and so does this process. torch can't end a communicator whose
    operation hangs: after a `GroupError` this process must end.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """size: ranks, this one included. device: GPU of the tensors."""
        self.size, self._device = size, device
        self._id: bytes = torch.cuda.nccl.unique_id()
        self._stream = torch.cuda.Stream(device)
        self._comm: Any = None

    @property
    def unique_id(self) -> str:
        """For the workers: base64 of NCCL's id."""
        return base64.b64encode(self._id).decode()

    async def join(self, timeout: float) -> None:
        """Connect to the workers, which must be joining. Raises GroupError after `timeout` seconds."""
        try:
            await asyncio.wait_for(in_thread(self._connect), timeout)
            await self._finish(timeout)
        except (RuntimeError, TimeoutError) as error:
            raise GroupError(f"no NCCL group with the servers: {type(error).__name__} {error}") from None

    def _connect(self) -> None:
        torch.cuda.set_device(self._device)
        self._comm = torch.cuda.nccl.init_rank(self.size, self._id, 0)
        one = torch.zeros(1, device=self._device)
        torch.cuda.nccl.all_reduce([one], streams=[self._stream], comms=[self._comm])

    async def broadcast(self, tensors: Sequence[Tensor], timeout: float) -> None:
        """Send the tensors, one after the other. Raises GroupError after `timeout` seconds."""
        try:
            with torch.cuda.device(self._device):
                for tensor in tensors:
                    torch.cuda.nccl.broadcast([tensor], streams=[self._stream], comms=[self._comm])
            await self._finish(timeout)
        except (RuntimeError, TimeoutError) as error:
            raise GroupError(f"the broadcast broke: {type(error).__name__} {error}") from None

    async def _finish(self, timeout: float) -> None:
        done = self._stream.record_event()
        deadline = asyncio.get_running_loop().time() + timeout
        while not done.query():
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"after {timeout:g} s")
            await asyncio.sleep(_POLL_SECONDS)
