"""The communicator of vLLM's NCCL engine, with stand-ins for torch's calls: it has not run on a GPU."""

from __future__ import annotations

import asyncio
import base64
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gspo.rollout.vllm.nccl_group import NCCLGroup
from megatron_gspo.weight_transport.update_group import GroupError

GPU, ID = torch.device("cuda", 0), bytes(range(128))


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    """What NCCL was asked for, and a namespace whose `ends` says whether its operations end."""
    made, state = [], SimpleNamespace(ends=True)
    event = SimpleNamespace(query=lambda: state.ends)
    monkeypatch.setattr(torch.cuda.nccl, "unique_id", lambda: ID)
    monkeypatch.setattr(torch.cuda.nccl, "init_rank", lambda *given: made.append(given) or "comm")
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", lambda one, streams, comms: made.append(comms))
    monkeypatch.setattr(torch.cuda.nccl, "broadcast", lambda one, streams, comms: made.append((one[0].item(), *comms)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    return [made, state]


async def joined(tensors: list[torch.Tensor], timeout: float = 5.0) -> NCCLGroup:
    group = NCCLGroup(3, GPU)
    await group.join(timeout)
    await group.broadcast(tensors, timeout)
    return group


def test_it_joins_as_rank_0_and_sends_one_tensor_after_the_other(calls):
    made, _ = calls
    group = asyncio.run(joined([torch.tensor(1.0), torch.tensor(2.0)]))
    assert base64.b64decode(group.unique_id) == ID
    assert made == [(3, ID, 0), ["comm"], (1.0, "comm"), (2.0, "comm")]


def test_an_operation_that_does_not_end_is_an_error(calls):
    calls[1].ends = False
    with pytest.raises(GroupError, match="^no NCCL group with the servers: TimeoutError after 0.05 s"):
        asyncio.run(joined([], 0.05))
