"""Requests to SGLang: paths, bodies, bounds of the responses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.server_engine.server_api import RequestContext, ServerAPI
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.servers.http_client import ServerClient
from tests.servers.web_server import run_command
from tests.support.served_models import served_model

API = SGLangAPI()
MOE = served_model(moe_layers=(True, False), k=2, num_experts=8, stop_ids=(1, 5))


def context(model: Any = MOE, **changes: Any) -> RequestContext:
    return RequestContext(
        **{**dict(name="sample 0/0", context_length=3, max_new_tokens=7, model=model), **changes}
    )


@pytest.mark.parametrize("name", [name for name in vars(ServerAPI) if not name.startswith("_")])
def test_it_follows_the_protocol(name):
    assert inspect.signature(getattr(SGLangAPI, name)) == inspect.signature(
        getattr(ServerAPI, name)
    )


def test_a_sampled_request_names_every_parameter_that_a_server_could_default():
    sampling = SamplingParams(
        n_samples_per_prompt=2, max_response_length=9, temperature=0.7, top_p=0.9, top_k=0
    )
    request = API.generate_request([2, 3, 4], context(routes_start=2), sampling, 11)
    assert request.path == "/generate"
    assert request.body == {
        "input_ids": [2, 3, 4],
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": 2,
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [1, 5],
            "sampling_seed": 11,
        },
    }


def test_a_greedy_request_without_routes():
    sampling = SamplingParams(
        n_samples_per_prompt=1, max_response_length=9, temperature=0.0, top_k=4
    )
    request = API.generate_request([2], context(served_model()), sampling, 0)
    assert (
        request.body["sampling_params"]["temperature"] == 0.0
        and request.body["sampling_params"]["top_k"] == 4
    )
    assert "return_routed_experts" not in request.body
    assert request.max_bytes < API.generate_request([2], context(), sampling, 0).max_bytes


def test_prefill_and_score():
    prefill = API.prefill_request([2, 3], context(max_new_tokens=0))
    assert (
        prefill.body["sampling_params"]["max_new_tokens"] == 0
        and "return_logprob" not in prefill.body
    )
    score = API.score_request([2, 3, 4], context(max_new_tokens=1))
    assert score.body["logprob_start_len"] == 0 and score.body["return_logprob"]
    longer = API.score_request([2] * 1003, context(max_new_tokens=1))
    assert longer.max_bytes - score.max_bytes == 128_000


def sent(
    command: Callable[[ServerClient], Any], answer: Any = None
) -> tuple[list[tuple[str, Any]], Any]:
    """(path, body) of the requests of a command, and its value."""
    requests: list[tuple[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        requests.append((request.path, await request.json() if request.method == "POST" else None))
        return web.json_response(answer)

    return requests, run_command(command, handle)


def test_commands():
    assert sent(lambda s: API.check_health(s, timeout=5))[0] == [("/health", None)]
    assert sent(lambda s: API.abort_requests(s, timeout=5))[0] == [
        ("/abort_request", {"rid": "", "abort_all": True})
    ]
    assert sent(lambda s: API.release_memory(s, timeout=5))[0] == [
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    ]
    assert sent(lambda s: API.restore_memory(s, "weights", timeout=5))[0] == [
        ("/resume_memory_occupation", {"tags": ["weights"]})
    ]


@pytest.mark.parametrize(
    "answer, version",
    [({"weight_version": "a:1"}, "a:1"), ({"weight_version": 1}, None), ({}, None), ([], None)],
)
def test_the_reported_version(answer, version):
    assert sent(lambda s: API.weight_version(s, timeout=5), answer) == (
        [("/model_info", None)],
        version,
    )
