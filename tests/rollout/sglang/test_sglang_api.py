"""Requests to SGLang: paths, bodies, bounds of the responses.

With real servers: tests/sglang/.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.server_engine.server_api import RequestContext
from megatron_gspo.rollout.sglang import sglang_api
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.servers.http_client import ServerError
from tests.support.scripted_endpoints import Server
from tests.support.served_models import served_model

API = SGLangAPI()
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
MOE = served_model(moe_layers=(True, False), k=2, num_experts=8, stop_ids=(1, 5))


def context(model: Any = MOE, **changes: Any) -> RequestContext:
    return RequestContext(
        **{**dict(name="sample 0/0", context_length=3, max_new_tokens=7, model=model), **changes}
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


def test_the_most_likely_ids_are_requested():
    model = served_model(top_log_probs=8)
    request = API.generate_request([2, 3], context(model=model), SamplingParams(), 11)
    assert request.body["top_logprobs_num"] == 8


def test_the_ids_that_could_be_drawn_are_requested():
    sampling = SamplingParams(top_k=4, min_p=0.1, max_support=4)
    body = API.generate_request([2, 3], context(max_support=4), sampling, 11).body
    assert body["return_sampling_mask"] is True
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["min_p"]) == (4, 0.1)


def test_prefill_and_score():
    prefill = API.prefill_request([2, 3], context(max_new_tokens=0))
    assert prefill.body["sampling_params"]["max_new_tokens"] == 0
    assert "return_logprob" not in prefill.body
    score = API.score_request([2, 3, 4], context(max_new_tokens=1))
    assert score.body["logprob_start_len"] == 0 and score.body["return_logprob"]
    longer = API.score_request([2] * 1003, context(max_new_tokens=1))
    assert longer.max_bytes - score.max_bytes == 128_000


def test_what_a_server_reports():
    server = Server(
        server_info=INFO,
        model_info={"weight_version": "a:1", "model_path": "/m"},
        begin_weight_update=405,
    )
    info = server.run(lambda s: API.server_info(s, timeout=60))
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
        Server(server_info=info, model_info={}).run(lambda s: API.server_info(s, timeout=60))
    assert not caught.value.retry


def test_a_session_left_open_is_closed_first():
    server = Server(begin_weight_update=[400, SUCCESS])
    server.run(lambda s: API.begin_update(s, timeout=60))
    assert server.paths == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
    with pytest.raises(ServerError, match="answered 500"):
        Server(begin_weight_update=500).run(lambda s: API.begin_update(s, timeout=60))


def test_the_cache_is_flushed_when_the_requests_have_ended(monkeypatch):
    monkeypatch.setattr(sglang_api, "_FLUSH_POLL_SECONDS", 0.0)
    server = Server(flush_cache=[400, 400, SUCCESS])
    server.run(lambda s: API.flush_cache(s, timeout=60))
    assert server.paths == ["/flush_cache"] * 3
    with pytest.raises(ServerError, match="answered 400"):
        Server(flush_cache=400).run(lambda s: API.flush_cache(s, timeout=1.0))


def test_a_failure_reported_with_status_200():
    server = Server(update_weight_version={"success": False, "message": "no"})
    with pytest.raises(ServerError, match="/update_weight_version: did not succeed: no") as caught:
        server.run(lambda s: API.set_version(s, "a:1", timeout=60))
    assert caught.value.status == 200 and not caught.value.retry
    assert server.requests[0][1] == {"new_version": "a:1", "abort_all_requests": False}
