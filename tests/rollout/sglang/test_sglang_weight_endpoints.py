"""Requests of a weight update to SGLang. With real servers: tests/sglang/test_weights.py."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from megatron_gspo.rollout.sglang import sglang_weight_endpoints
from megatron_gspo.rollout.sglang.sglang_weight_endpoints import SGLangWeightEndpoints
from megatron_gspo.servers.http_client import ServerClient, ServerError
from megatron_gspo.weight_transport.buckets import Entry
from megatron_gspo.weight_transport.server_endpoints import WeightEndpoints
from tests.support.scripted_endpoints import Server

ENDPOINTS = SGLangWeightEndpoints()
SUCCESS = {"success": True}
INFO = {
    "version": "0.5.23",
    "random_seed": 7,
    "startup_time": 8.5,
    "device": "cuda",
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "max_req_input_len": 100,
    "max_total_num_tokens": 4000,
    "enable_return_routed_experts": True,
    "api_key": "a-key",
}


METHODS = [
    name
    for name, value in vars(WeightEndpoints).items()
    if callable(value) and not name.startswith("_")
]


@pytest.mark.parametrize("name", METHODS)
def test_it_follows_the_protocol(name):
    assert inspect.signature(getattr(SGLangWeightEndpoints, name)) == inspect.signature(
        getattr(WeightEndpoints, name)
    )


def test_what_a_server_reports():
    server = Server(
        server_info=INFO,
        model_info={"weight_version": "a:1", "model_path": "/m"},
        begin_weight_update=405,
    )
    info = server.run(lambda s: ENDPOINTS.server_info(s, timeout=5))
    assert (info.version, info.device, info.weight_version, info.model_path) == (
        "0.5.23",
        "cuda",
        "a:1",
        "/m",
    )
    assert (info.tp_size, info.max_input_tokens, info.max_total_tokens, info.start_id) == (
        2,
        100,
        4000,
        "7 8.5",
    )
    assert info.routed_experts and info.update_session
    assert "a-key" not in repr(info)


@pytest.mark.parametrize(
    "info, problem",
    [
        ("text", "not an object; is this an SGLang server?"),
        ({"tp_size": "2"}, "tp_size is 2, not a count"),
        ({"dp_size": True}, "dp_size is True, not a count"),
    ],
)
def test_an_invalid_report(info, problem):
    with pytest.raises(ServerError, match=problem) as caught:
        Server(server_info=info, model_info={}).run(lambda s: ENDPOINTS.server_info(s, timeout=5))
    assert not caught.value.retry


def test_a_session_left_open_is_closed_first():
    server = Server(begin_weight_update=[400, SUCCESS])
    server.run(lambda s: ENDPOINTS.begin_update(s, timeout=5))
    assert server.paths == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
    with pytest.raises(ServerError, match="answered 500"):
        Server(begin_weight_update=500).run(lambda s: ENDPOINTS.begin_update(s, timeout=5))


def test_the_cache_is_flushed_when_the_requests_have_ended(monkeypatch):
    monkeypatch.setattr(sglang_weight_endpoints, "_FLUSH_POLL_SECONDS", 0.0)
    server = Server(flush_cache=[400, 400, SUCCESS])
    server.run(lambda s: ENDPOINTS.flush_cache(s, timeout=5))
    assert server.paths == ["/flush_cache"] * 3
    with pytest.raises(ServerError, match="answered 400"):
        Server(flush_cache=400).run(lambda s: ENDPOINTS.flush_cache(s, timeout=0.05))


def test_a_failure_reported_with_status_200():
    server = Server(update_weight_version={"success": False, "message": "no"})
    with pytest.raises(ServerError, match="/update_weight_version: did not succeed: no") as caught:
        server.run(lambda s: ENDPOINTS.set_version(s, "a:1", timeout=5))
    assert caught.value.status == 200 and not caught.value.retry
    assert server.requests[0][1] == {"new_version": "a:1", "abort_all_requests": False}


def test_weights_by_each_way():
    server = Server()

    async def all_ways(client: ServerClient) -> None:
        await ENDPOINTS.load_checkpoint(client, Path("/w"), timeout=5)
        await ENDPOINTS.load_payloads(client, [[b"ab"], [b"c"]], timeout=5)
        entry = Entry("a.weight", torch.bfloat16, (2, 3), 0, 12)
        await ENDPOINTS.load_broadcast(client, "group", [entry], timeout=5)

    server.run(all_ways)
    checkpoint, tensors, broadcast = (body for _, body in server.requests)
    assert server.paths == [
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        ENDPOINTS.broadcast_path,
    ]
    assert checkpoint == {"model_path": "/w", "load_format": "auto", "flush_cache": False}
    assert (
        tensors["serialized_named_tensors"] == ["YWI=", "Yw=="]
        and tensors["load_format"] == "flattened_bucket"
    )
    assert (broadcast["names"], broadcast["dtypes"], broadcast["shapes"]) == (
        ["a.weight"],
        ["bfloat16"],
        [[2, 3]],
    )
    assert broadcast["group_name"] == "group" and not broadcast["flush_cache"]
