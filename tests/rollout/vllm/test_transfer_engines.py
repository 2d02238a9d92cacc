"""vLLM's own transfer engines: refused without GPUs, and the requests that a server gets. None has run on a GPU."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_gspo.rollout.vllm import transfer_engines
from megatron_gspo.rollout.vllm.transfer_engines import CUDAIPCTransport, NCCLTransport
from megatron_gspo.rollout.vllm.vllm_weight_endpoints import VLLMWeightEndpoints
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.transport import Sent, Target
from megatron_gspo.weight_transport.update_group import GroupError
from tests.rollout.vllm.test_vllm_weight_endpoints import info
from tests.support.scripted_endpoints import Server

URL = "http://a:1"
ENDPOINTS = VLLMWeightEndpoints()
WEIGHTS = [("a", torch.zeros(2, 3)), ("b", torch.ones(5, dtype=torch.bfloat16))]
NAMES = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [5]]}
RESET = ("/collective_rpc", {"method": "reset_transfer", "timeout": 5})


@pytest.fixture
def gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("transport", [NCCLTransport, CUDAIPCTransport])
def test_a_cpu_on_either_side_is_refused(transport, monkeypatch):
    one = {"parallel_config": {"tensor_parallel_size": 1}}
    words = f"vLLM's {transport.backend} transfer engine needs GPUs on both sides"
    assert words in transport(ENDPOINTS).unsupported(info(**one))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert words in transport(ENDPOINTS).unsupported(info(**one, device_config={"device": "cpu"}))
    assert f"--weight-transfer-config '{{\"backend\": \"{transport.backend}\"}}'" in transport(
        ENDPOINTS).unsupported(info(**one))  # fmt: skip
    right = {"weight_transfer_config": {"backend": transport.backend}}
    assert transport(ENDPOINTS).unsupported(info(**one, **right)) == ""


def test_a_handle_is_for_one_worker(gpu):
    right = {"weight_transfer_config": {"backend": "ipc"}}
    assert "has several workers" in CUDAIPCTransport(ENDPOINTS).unsupported(info(**right))


def transfer(transport: Any, server: Server, **changes: Any) -> Sent:
    found = replace(info(**changes), url=URL)

    async def steps(client: Any) -> Sent:
        await transport.open({URL: Target(client, found)}, 5)
        for bucket in buckets(WEIGHTS, 1000):
            await transport.send(bucket, 5)
        return await transport.finish(5)

    return server.run(steps)


def test_the_requests_of_a_handle(monkeypatch):
    monkeypatch.setattr(transfer_engines, "pickled_handle", lambda bucket: "aGFuZGxl")
    server = Server()
    assert transfer(CUDAIPCTransport(ENDPOINTS), server).failures == {}
    sizes = {"tensor_sizes": [24, 10], "ipc_handles_pickled": "aGFuZGxl"}
    assert server.requests == [
        ("/init_weight_transfer_engine", {"init_info": {"packed": True}}), RESET, ("/start_weight_update", {}),
        ("/update_weights", {"update_info": NAMES | sizes}), ("/finish_weight_update", {}),
    ]  # fmt: skip


class Group:
    """As `NCCLGroup`, with what it was asked for. fails: in the broadcast."""

    made: list[Group] = []
    fails = False

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.unique_id, self.sent = size, "aWQ=", []
        self.made.append(self)

    async def join(self, timeout: float) -> None:
        await asyncio.sleep(0)

    async def broadcast(self, tensors: list[torch.Tensor], timeout: float) -> None:
        if self.fails:
            raise GroupError("the broadcast broke: TimeoutError after 5 s")
        self.sent += [tensor.tolist() for tensor in tensors]


@pytest.fixture
def group(gpu, monkeypatch) -> type[Group]:
    monkeypatch.setattr(transfer_engines, "NCCLGroup", Group)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Group, "made", [])
    return Group


def test_the_requests_of_a_broadcast_and_a_group_that_is_kept(group):
    """Of a server with two workers: ranks 1 and 2 of three."""
    server, transport = Server(), NCCLTransport(ENDPOINTS)
    joins = {"nccl_unique_id_b64": "aWQ=", "rank_offset": 1, "world_size": 3, "packed": False}
    loads = [RESET, ("/start_weight_update", {}), ("/update_weights", {"update_info": NAMES}),
             ("/finish_weight_update", {})]  # fmt: skip
    for _ in range(2):
        assert transfer(transport, server).failures == {}
    assert server.requests == [("/shutdown_weight_transfer_engine", {}),
                               ("/init_weight_transfer_engine", {"init_info": joins}), *loads, *loads]  # fmt: skip
    assert [made.sent for made in group.made] == [[tensor.tolist() for _, tensor in WEIGHTS] * 2]
    transfer(transport, server, instance_id="18")  # restarted
    assert len(group.made) == 2


def test_a_broken_group_fails_all_of_its_servers(group, monkeypatch):
    monkeypatch.setattr(group, "fails", True)
    transport = NCCLTransport(ENDPOINTS)
    [error] = transfer(transport, Server()).failures.values()
    assert "the broadcast broke: TimeoutError after 5 s" in str(error) and not error.retry and transport.is_over
    monkeypatch.setattr(group, "fails", False)
    assert transfer(transport, Server()).failures == {} and len(group.made) == 2
