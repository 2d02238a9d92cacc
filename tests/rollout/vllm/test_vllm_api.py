"""The requests that vLLM gets."""

from __future__ import annotations

import inspect

import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.server_engine.server_api import ServerAPI
from megatron_gspo.rollout.vllm.vllm_api import VLLMAPI
from tests.support.sglang_responses import asked

API = VLLMAPI()


@pytest.mark.parametrize("name", [name for name in vars(ServerAPI) if not name.startswith("_")])
def test_it_follows_the_protocol(name):
    assert inspect.signature(getattr(VLLMAPI, name)) == inspect.signature(getattr(ServerAPI, name))


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
    ]
    assert [API.gives_log_probs(sampling) for sampling in given] == [True, True, False, False]
    request = API.generate_request([5], asked(log_probs=False), SamplingParams(top_p=0.5), 1)
    assert request.body["sampling_params"]["logprobs"] is None


def test_a_prompt_is_computed_and_scored_with_one_token():
    assert API.prefill_request([5, 6], asked()).body["sampling_params"]["max_tokens"] == 1
    params = API.score_request([5, 6], asked()).body["sampling_params"]
    assert (params["max_tokens"], params["prompt_logprobs"], params["temperature"]) == (1, 0, 0.0)
