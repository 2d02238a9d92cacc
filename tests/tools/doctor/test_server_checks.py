"""SGLang servers: their info compared with what the run needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megatron_gspo.config import Config, load_config
from megatron_gspo.tools.doctor.server_checks import (
    judge_own_address,
    judge_server,
    judge_servers,
    query_servers,
)
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from tests.servers.web_server import WebServer
from tests.support.ports import free_port

SERVER = ServerInfo(
    url="http://127.0.0.1:30000",
    version="0.5.23",
    start_id="1 2",
    weight_version="default",
    model_path="/models/a",
    device="cuda",
    tp_size=2,
    pp_size=1,
    dp_size=1,
    max_input_tokens=4096,
    max_total_tokens=100_000,
    routed_experts=True,
    update_session=True,
)


@pytest.fixture
def config(config_file) -> Config:
    return load_config(config_file(rollout={"engine": "sglang"}, sglang={"urls": [SERVER.url]}))


def levels(config: Config, server: ServerInfo) -> list[tuple[str, str]]:
    return [(f.level, f.check) for f in judge_server(config, server)]


def test_a_server_that_is_well(config):
    assert levels(config, SERVER) == [("ok", "versions.sglang"), ("ok", "servers.answer")]


@pytest.mark.parametrize(
    "changes, check, says",
    [
        (
            {"max_input_tokens": 16},
            "servers.length",
            "takes prompts of at most 16 tokens, data.max_prompt_length = 32",
        ),
        ({"max_total_tokens": 36}, "servers.length", "holds sequences of at most 36 tokens"),
        ({"pp_size": 2}, "servers.weights", "has pp_size 2"),
        ({"dp_size": 4}, "servers.weights", "has dp_size 4"),
    ],
)
def test_a_server_that_cannot_serve_this_run(config, changes, check, says):
    faults = [f for f in judge_server(config, replace(SERVER, **changes)) if f.level != "ok"]
    assert [(f.level, f.check) for f in faults] == [("error", check)]
    assert says in faults[0].what and faults[0].fix


def test_a_vllm_server(config_file):
    """Its limits are named by its own arguments, and a colocated one must free its memory."""
    section = {"urls": [SERVER.url], "weight_transport": "disk", "colocated": True}
    ours = load_config(config_file(rollout={"engine": "vllm"}, vllm=section))
    server = replace(SERVER, version="0.32.0", update_session=False, receiver=True)
    assert levels(ours, server) == [("ok", "versions.vllm"), ("ok", "servers.answer")]
    for changes, check, fix in (
        ({"max_input_tokens": 16}, "servers.length", "--max-model-len"),
        ({"max_total_tokens": 36}, "servers.length", "--gpu-memory-utilization"),
        ({"keeps_memory": "it keeps it; start another"}, "servers.memory", "start another"),
        ({"refusal": "raw; change it"}, "servers.log_probs", "change it"),
    ):
        [_, fault] = judge_server(ours, replace(server, **changes))
        assert (fault.level, fault.check) == ("error", check) and fix in fault.fix


def test_routes_that_a_run_needs(config_file):
    needs_routes = load_config(
        config_file(
            rollout={"engine": "sglang"}, sglang={"urls": [SERVER.url]}, routing={"replay": "r3"}
        )
    )
    assert levels(needs_routes, SERVER)[1] == ("ok", "servers.answer")
    assert levels(needs_routes, replace(SERVER, routed_experts=False))[1] == (
        "error",
        "servers.routes",
    )
    on_cpu = replace(SERVER, device="cpu", version="0.5.15.post1")
    assert levels(needs_routes, on_cpu)[1] == ("warning", "servers.routes")
    assert levels(needs_routes, replace(on_cpu, version="0.5.23"))[1] == ("ok", "servers.answer")


def test_servers_of_different_versions(config):
    found = judge_servers(config, {"a": SERVER, "b": replace(SERVER, version="0.5.20")})
    assert [f.what for f in found if f.level == "warning"] == [
        "the servers run different versions: 0.5.20, 0.5.23"
    ]


def test_an_address_that_only_this_machine_knows(config_file):
    servers = {"urls": ["http://node7:30000"]}
    far = load_config(
        config_file(rollout={"engine": "sglang"}, sglang={**servers, "master_address": "127.0.0.1"})
    )
    found = judge_servers(far, {"http://node7:30000": SERVER})
    assert [f.check for f in found if f.level == "error"] == ["servers.address"]
    told = load_config(
        config_file(
            rollout={"engine": "sglang"},
            sglang={"urls": ["http://node7:30000"], "master_address": "10.0.0.1"},
        )
    )
    assert [
        f for f in judge_servers(told, {"http://node7:30000": SERVER}) if f.level == "error"
    ] == []


@pytest.mark.parametrize(
    "changes, faults",
    [
        ({}, 0),
        ({"master_address": "192.0.2.1"}, 1),
        ({"master_address": "192.0.2.1", "weight_transport": "disk"}, 0),
    ],
)
def test_rank_0_is_where_the_servers_look_for_it(config_file, changes, faults):
    """192.0.2.1 is kept for documentation, and no machine's.

    So is the node that c10d didn't make the first.
    """
    config = load_config(
        config_file(rollout={"engine": "sglang"}, sglang={"urls": [SERVER.url], **changes})
    )
    found = judge_own_address(config)
    assert [(f.level, f.check) for f in found] == [("error", "servers.address")] * faults
    assert all("192.0.2.1" in f.what and "cannot assign requested address" in f.what for f in found)


def test_servers_are_asked(config_file):
    info: dict[str, Any] = {
        "version": "0.5.9",
        "device": "cpu",
        "tp_size": 1,
        "max_total_num_tokens": 8192,
    }

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/server_info":
            return web.json_response(info | {"api_key": "secret"})
        if request.path == "/model_info":
            return web.json_response({"model_path": "/models/tiny", "weight_version": "default"})
        return web.Response(status=405)

    with WebServer(answer) as server:
        silent = f"http://127.0.0.1:{free_port()}"
        config = load_config(
            config_file(rollout={"engine": "sglang"}, sglang={"urls": [server.url, silent]})
        )
        found = judge_servers(config, query_servers(config))
    assert [(f.level, f.check) for f in found] == [
        ("warning", "versions.sglang"),
        ("ok", "servers.answer"),
        ("error", "servers.answer"),
    ]
    assert found[1].what == f"{server.url}: cpu, TP 1, PP 1, DP 1, serves /models/tiny"
    assert found[2].what.startswith(
        f"server {silent}/server_info: no connection (connection refused)"
    )
    assert "secret" not in " ".join(f.line for f in found)
