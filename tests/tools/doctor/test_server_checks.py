"""SGLang and vLLM servers: their info compared with what the run needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megatron_gspo.config import load_config
from megatron_gspo.tools.doctor.server_checks import judge_server, query_servers
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from tests.servers.web_server import WebServer
from tests.support.ports import free_port

URL = "http://127.0.0.1:30000"
SGLANG = ServerInfo(
    url=URL,
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
VLLM = replace(SGLANG, version="0.32.0", update_session=False, receiver=True)
SECTIONS: dict[str, dict[str, Any]] = {
    "sglang": {"urls": [URL]},
    "vllm": {"urls": [URL], "weight_transport": "disk", "colocated": True},
}


@pytest.mark.parametrize("server, engine", [(SGLANG, "sglang"), (VLLM, "vllm")])
def test_a_server_that_is_well(server, engine, config_file):
    config = load_config(config_file(rollout={"engine": engine}, **{engine: SECTIONS[engine]}))
    findings = judge_server(config, URL, server)
    assert [(f.level, f.check) for f in findings] == [
        ("ok", f"versions.{engine}"),
        ("ok", "servers.answer"),
    ]
    assert findings[1].what == f"{URL}: cuda, TP 2, PP 1, DP 1, serves /models/a"


@pytest.mark.parametrize(
    "engine, changes, says, fix",
    [
        (
            "sglang",
            {"max_input_tokens": 16},
            "takes prompts of at most 16 tokens, data.max_prompt_length = 32",
            "--context-length",
        ),
        ("sglang", {"max_total_tokens": 36}, "holds sequences of at most 36 tokens", "--"),
        ("sglang", {"pp_size": 2}, "has pp_size 2", ""),
        (
            "sglang",
            {"routed_experts": False},
            "no routed experts",
            "--enable-return-routed-experts",
        ),
        ("vllm", {"max_input_tokens": 16}, "takes prompts", "--max-model-len"),
        ("vllm", {"max_total_tokens": 36}, "holds sequences", "--gpu-memory-utilization"),
        ("vllm", {"keeps_memory": "it keeps it; start another"}, "it keeps it", "start another"),
        ("vllm", {"refusal": "raw; change it"}, "raw", "change it"),
    ],
)
def test_a_server_that_cannot_serve_this_run(engine, changes, says, fix, config_file):
    routing = {"replay": "r3" if engine == "sglang" else "none"}
    config = load_config(
        config_file(rollout={"engine": engine}, routing=routing, **{engine: SECTIONS[engine]})
    )
    server = replace(SGLANG if engine == "sglang" else VLLM, **changes)
    [_, fault] = judge_server(config, URL, server)
    assert (fault.level, fault.check) == ("error", "servers.answer")
    assert says in fault.what and fault.fix and fix in fault.fix


def test_servers_are_asked(config_file):
    info = {"version": "0.5.9", "device": "cpu", "tp_size": 1, "max_total_num_tokens": 8192}

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
        answers = query_servers(config)
    findings = [f for url in answers for f in judge_server(config, url, answers[url])]
    assert [(f.level, f.check) for f in findings] == [
        ("warning", "versions.sglang"),
        ("ok", "servers.answer"),
        ("error", "servers.answer"),
    ]
    assert findings[1].what == f"{server.url}: cpu, TP 1, PP 1, DP 1, serves /models/tiny"
    assert findings[2].what.startswith(
        f"server {silent}/server_info: no connection (connection refused)"
    )
    assert "secret" not in " ".join(f.line for f in findings)
