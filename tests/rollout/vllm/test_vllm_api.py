"""The requests that vLLM gets. With real servers: tests/vllm/."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.vllm import vllm_api
from megatron_gspo.rollout.vllm.vllm_api import EXTENSION, VLLMAPI
from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport.receiver_transport import ReceiverTransport
from megatron_gspo.weight_transport.server_endpoints import ClearedWeights, ServerInfo
from tests.support.scripted_endpoints import Server
from tests.support.sglang_responses import asked

API = VLLMAPI()
# What vllm 0.32.0 reports, as far as it is read
CONFIG = {
    "model_config": {"model": "/m", "max_model_len": 512, "logprobs_mode": "processed_logprobs"},
    "parallel_config": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "worker_extension_cls": EXTENSION,
    },
    "cache_config": {"block_size": 128, "num_gpu_blocks": 4096},
    "aux_output_config": {"enable_return_routed_experts": False},
    "device_config": {"device": "cuda:0"},
    "speculative_config": None,
    "instance_id": "17",
}


def test_a_generation_names_every_parameter_that_a_server_could_default():
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5)
    request = API.generate_request([5, 6, 7, 8, 9], asked(routes_start=3), sampling, 2**62 + 1)
    assert request.path == "/inference/v1/generate"
    assert request.body == {
        "token_ids": [5, 6, 7, 8, 9],
        "sampling_params": {
            "max_tokens": 4,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "stop_token_ids": [1],
            "ignore_eos": True,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": 2**62 + 1,
            "logprobs": 0,
            "routed_experts_prompt_start": 3,
            "detokenize": False,
        },
    }
    greedy = API.generate_request(
        [5], asked(), SamplingParams(temperature=0.0, top_p=0.5, top_k=3), 1
    )
    params = greedy.body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.0, 1.0, 0)


def test_log_probs_are_requested_where_they_are_over_the_whole_vocabulary():
    given = [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_p=0.5),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=0.1, max_support=4),
    ]
    given_for = [API.gives_log_probs(sampling) for sampling in given]
    assert given_for == [True, True, False, False, False, True]
    request = API.generate_request([5], asked(log_probs=False), SamplingParams(top_p=0.5), 1)
    assert request.body["sampling_params"]["logprobs"] is None
    with_top = replace(asked().model, top_log_probs=8)
    for log_probs, wanted in ((True, 9), (False, None)):
        context = asked(model=with_top, log_probs=log_probs)
        request = API.generate_request([5], context, SamplingParams(), 1)
        assert request.body["sampling_params"]["logprobs"] == wanted
    sampling = SamplingParams(min_p=0.1, max_support=4)
    params = API.generate_request([5], asked(max_support=4), sampling, 1).body["sampling_params"]
    assert (params["min_p"], params["logprobs"]) == (0.1, 5)


def info(generates: int = 405, **changes: Any) -> ServerInfo:
    config = copy.deepcopy(CONFIG)
    for section, values in changes.items():
        config[section] = (
            (config.get(section) or {}) | values if isinstance(values, dict) else values
        )
    server = Server(
        server_info={"vllm_config": config},
        version={"version": "0.32.0"},
        weight_info={"weight_version": "a:1"},
        **{"inference/v1/generate": generates},
    )
    return server.run(lambda s: API.server_info(s, timeout=60))


def test_what_a_server_reports():
    reported = info()
    assert (reported.version, reported.device, reported.weight_version, reported.model_path) == (
        "0.32.0",
        "cuda",
        "a:1",
        "/m",
    )
    assert (
        reported.tp_size,
        reported.max_input_tokens,
        reported.max_total_tokens,
        reported.start_id,
    ) == (
        2,
        512,
        512,
        "17",
    )
    assert info(cache_config={"num_gpu_blocks": 2}).max_total_tokens == 256
    assert (reported.routed_experts, reported.speculative, reported.receiver, reported.refusal) == (
        False,
        False,
        True,
        "",
    )
    assert reported.unusable(routes=False) == ""


UNUSABLE = {
    "raw log-probs": (
        {"model_config": {"logprobs_mode": "raw_logprobs"}},
        "--logprobs-mode processed_logprobs",
    ),
    "no tokens": ({"generates": 404}, "start it with --enable-scale-out"),
    "no extension": (
        {"parallel_config": {"worker_extension_cls": "theirs.Extension"}},
        "start it with megatron-gspo serve --engine vllm",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_server_whose_log_probs_would_be_wrong_is_refused(case):
    changes, message = UNUSABLE[case]
    assert message in info(**changes).unusable(routes=False)


def test_routes_are_refused_where_the_server_gives_none_or_mixes_them_up():
    assert "start it with --enable-return-routed-experts" in info().unusable(routes=True)
    gives = {"aux_output_config": {"enable_return_routed_experts": True}}
    assert info(**gives).unusable(routes=True) == ""
    speculative = info(**gives, speculative_config={"method": "ngram"})
    assert "decodes speculatively" in speculative.unusable(routes=True)
    assert speculative.unusable(routes=False) == ""


def test_a_transport_names_a_server_without_the_receiver():
    bare = info(parallel_config={"worker_extension_cls": "theirs.Extension"})
    assert "no receiver of weights; start it with megatron-gspo serve" in ReceiverTransport(
        API
    ).unsupported(bare)
    assert ReceiverTransport(API).unsupported(info()) == ""


def test_a_server_in_another_mode_is_named():
    with pytest.raises(
        ServerError, match="not an object; is this a vLLM server with VLLM_SERVER_DEV_MODE=1"
    ):
        Server(server_info="text").run(lambda s: API.server_info(s, timeout=60))


def test_the_proof_of_an_update_names_what_was_not_written():
    """Of five parameters one was zero before and one has no bytes: their digests say nothing."""

    def sums(**digests: str) -> dict[str, Any]:
        return {"checksums": {"a": "a1", "b": "b1", "c": "c1", "zero": "z", "empty": "e"} | digests}

    zeros = sums(a="a0", b="b0", c="c0")
    server = Server(
        weight_checker=[sums(), {"status": "reset"}, zeros, sums(a="a2", b="b0", c="c0")]
    )

    async def steps(s: Any) -> tuple[ClearedWeights, list[str]]:
        cleared = await API.clear_weights(s, timeout=60)
        return cleared, await API.unwritten(s, cleared, timeout=60)

    assert server.run(steps) == (ClearedWeights({"a": "a0", "b": "b0", "c": "c0"}, 5), ["b", "c"])
    assert [body["action"] for _, body in server.requests] == [
        "checksum",
        "reset",
        "checksum",
        "checksum",
    ]
    with pytest.raises(ServerError, match="/weight_checker: no checksums came back"):
        Server(weight_checker={"checksums": {}}).run(lambda s: API.clear_weights(s, timeout=60))


def test_a_colocated_server_must_free_its_memory():
    awake = info()
    assert "--enable-sleep-mode" in awake.unusable(routes=False, colocated=True)
    assert not awake.unusable(routes=False)
    assert (
        info(model_config={"enable_sleep_mode": True}).unusable(routes=False, colocated=True) == ""
    )


def test_the_cache_is_emptied_when_the_requests_have_ended(monkeypatch):
    monkeypatch.setattr(vllm_api, "_FLUSH_POLL_SECONDS", 0.0)
    busy = {"success": False}
    server = Server(reset_prefix_cache=[busy, busy, {"success": True}])
    server.run(lambda s: API.flush_cache(s, timeout=60))
    assert server.paths == ["/reset_prefix_cache"] * 3
    with pytest.raises(ServerError, match="the prefix cache was not emptied within"):
        Server(reset_prefix_cache=busy).run(lambda s: API.flush_cache(s, timeout=1))
