"""Weights through vLLM's own transfer engines: NCCL broadcasts, and CUDA IPC handles. They need GPUs on both sides.

vLLM's engines have one sender, so rank 0 gathers the weights and sends everything. A transfer opens all layers of a
server for loading and closes them at its end; what a failed one has left open is closed first.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import reduce_tensor

from megatron_gspo.rollout.vllm.nccl_group import NCCLGroup
from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport.buckets import Bucket
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport
from megatron_gspo.weight_transport.update_group import GroupError


class TransferEngineTransport(WeightTransport):
    """Base class. backend: vLLM's name of the engine, which the servers are started with."""

    backend: ClassVar[str]
    needs_session = False
    device = None  # the stream's own

    def unsupported(self, info: ServerInfo) -> str:
        """See `WeightTransport.unsupported`: a CPU on either side, and servers that were started without the engine."""
        if info.device != "cuda" or not torch.cuda.is_available():
            return (f"vLLM's {self.backend} transfer engine needs GPUs on both sides, and one has none; "
                    "use weight_transport=distributed or disk")  # fmt: skip
        if info.transfer_engine != self.backend:
            return (f"has the transfer engine {info.transfer_engine or 'none'}; start it with "
                    f"--weight-transfer-config '{{\"backend\": \"{self.backend}\"}}'")  # fmt: skip
        return super().unsupported(info)

    async def open(self, targets: Mapping[str, Target], timeout: float) -> None:
        """See `WeightTransport.open`."""
        await super().open(targets, timeout)
        await self._connect(timeout)
        await self.on_each(lambda target: self._post(target, "reset_transfer", None, timeout))
        await self.on_each(lambda target: self._post(target, "start_weight_update", None, timeout))

    async def finish(self, timeout: float) -> Sent:
        """See `WeightTransport.finish`."""
        await self.on_each(lambda target: self._post(target, "finish_weight_update", None, timeout))
        return Sent(self.failures)

    async def _connect(self, timeout: float) -> None:
        """Let the engines of the servers know this sender."""
        raise NotImplementedError

    async def _post(self, target: Target, path: str, body: dict[str, Any] | None, timeout: float) -> None:
        """A request of the transfer. reset_transfer: of our worker extension."""
        if path == "reset_transfer":
            path, body = "collective_rpc", {"method": path, "timeout": timeout}
        await target.client.post(f"/{path}", body, timeout=timeout)


def update_info(bucket: Bucket) -> dict[str, Any]:
    """vLLM's description of a bucket's tensors."""
    return {"names": [e.name for e in bucket.entries],
            "dtype_names": [str(e.dtype).removeprefix("torch.") for e in bucket.entries],
            "shapes": [list(e.shape) for e in bucket.entries]}  # fmt: skip


class NCCLTransport(TransferEngineTransport):
    """A broadcast per tensor in a communicator of rank 0 and all workers, kept while the servers are the same.

    A server that fails breaks the communicator for all of them, and torch can't end one that hangs: the update then
    fails on every server, and the run has to start again from its checkpoint.
    """

    backend = "nccl"

    def __init__(self, endpoints: WeightEndpoints, *, checksums: bool = False) -> None:
        super().__init__(endpoints, checksums=checksums)
        self._group: NCCLGroup | None = None
        self._members: dict[str, str] = {}  # start_id of each server of the group

    async def _connect(self, timeout: float) -> None:
        members = {url: target.info.start_id for url, target in self.targets.items()}
        if self._group is not None and members == self._members:
            return
        self.close()
        sizes = {url: target.info.tp_size * target.info.pp_size for url, target in self.targets.items()}
        group = NCCLGroup(1 + sum(sizes.values()), torch.device("cuda", torch.cuda.current_device()))
        first = {url: 1 + sum(list(sizes.values())[:number]) for number, url in enumerate(sizes)}

        async def join(target: Target) -> None:
            info = {"nccl_unique_id_b64": group.unique_id, "rank_offset": first[target.info.url],
                    "world_size": group.size, "packed": False}  # fmt: skip
            await self._post(target, "shutdown_weight_transfer_engine", None, timeout)
            await self._post(target, "init_weight_transfer_engine", {"init_info": info}, timeout)

        await self._together(self.on_each(join), group.join(timeout))
        self._group, self._members = group, members

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`."""
        if not self.targets:
            return
        assert self._group is not None
        body = {"update_info": update_info(bucket)}
        await self._together(self.on_each(lambda target: self._post(target, "update_weights", body, timeout)),
                             self._group.broadcast([tensor for _, tensor in bucket.tensors()], timeout))  # fmt: skip

    async def _together(self, requests: Any, group: Any) -> None:
        """Requests whose workers wait for an operation of the group, and the operation."""
        asked = asyncio.ensure_future(requests)
        try:
            await group
            await asked
        except GroupError as error:
            asked.cancel()
            for url in self.targets:
                self.failures[url] = ServerError(f"server {url}: {error}", retry=False)
            self.targets = {}
        if self.failures:
            self.close()

    def close(self) -> None:
        """See `WeightTransport.close`."""
        self._group, self._members = None, {}


class CUDAIPCTransport(TransferEngineTransport):
    """A handle to each bucket, for one worker on rank 0's own GPU."""

    backend = "ipc"

    def unsupported(self, info: ServerInfo) -> str:
        """See `WeightTransport.unsupported`: servers on several GPUs."""
        if info.tp_size * info.pp_size > 1:
            return "has several workers, and a handle works on rank 0's GPU; start it on one, or use another transport"
        return super().unsupported(info)

    async def _connect(self, timeout: float) -> None:
        body = {"init_info": {"packed": True}}
        await self.on_each(lambda target: self._post(target, "init_weight_transfer_engine", body, timeout))

    async def send(self, bucket: Bucket, timeout: float) -> None:
        """See `WeightTransport.send`. The worker copies before it answers."""
        body = {"update_info": update_info(bucket) | {
            "tensor_sizes": [entry.stop - entry.start for entry in bucket.entries],
            "ipc_handles_pickled": pickled_handle(bucket)}}  # fmt: skip
        await self.on_each(lambda target: self._post(target, "update_weights", body, timeout))


def pickled_handle(bucket: Bucket) -> str:
    """A handle to the bucket's memory, by the id of its GPU: what vLLM unpickles, in base64."""
    gpu = str(torch.cuda.get_device_properties(bucket.data.device).uuid)
    return base64.b64encode(pickle.dumps({gpu: reduce_tensor(bucket.data)[1]})).decode()
