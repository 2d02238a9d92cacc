"""Which requests are repeated, and how they are counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.request_stream import WeightsNeeded
from tests.support.served_models import served_model
from tests.support.sglang_generator import SAMPLING, Generator, Setup, expected, prompts

pytestmark = pytest.mark.usefixtures("short_pauses")


def change_meta(**values: Any):
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"] |= values
        return answer

    return change


def status(code: int):
    return lambda answer: web.Response(status=code, text="words of the server")


def half(answer: dict[str, Any]) -> web.Response:
    body = json.dumps(answer).encode()
    return web.Response(body=body[: len(body) // 2], content_type="application/json")


async def _late(answer: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(1.0)
    return answer


# what befalls an answer: the fault, and how it is counted
PASSING = {
    "error 500": (status(500), "retries"),
    "half": (half, "refused"),
    "late": (_late, "retries"),
    "text": (lambda answer: web.Response(text="ok"), "refused"),
    "NaN": (change_meta(output_token_logprobs=[[float("nan"), 15, None]] * 4), "refused"),
    "huge": (lambda answer: answer | {"text": "x" * 10**6}, "retries"),
    "nothing": (
        lambda answer: {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}},
        "retries",
    ),
}


def check(groups: list[list], wanted: list[Prompt]) -> None:
    """Every (prompt, sample) once, as the rule draws it."""
    keys = [(s.prompt_index, s.sample_index) for group in groups for s in group]
    assert keys == [(p.index, i) for p in wanted for i in range(SAMPLING.n_samples_per_prompt)]
    for prompt, group in zip(wanted, groups, strict=True):
        for sample in group:
            assert sample.response_ids.tolist() == expected(prompt)
            np.testing.assert_array_equal(
                sample.rollout_log_probs, -np.array(expected(prompt), np.float32) / 8
            )


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_fault_is_survived_and_counted_once(server, name):
    fault, counted = PASSING[name]
    server.breaks = [fault]
    with Setup(server.url, request_timeout=0.5 if name == "late" else 10.0) as setup:
        wanted = prompts(3)
        setup.stream.start(wanted, SAMPLING, seed=1)
        check(setup.stream.take(3), wanted)
        counts = setup.client.counts
    assert counts["requests"] == 6 and counts["retries"] == 1 and len(server.bodies) == 7
    assert counts["refused"] == (counted == "refused") and counts["stale_responses"] == 0
    assert counts["input_tokens"] == 6 * 5 and counts["cached_tokens"] == 6 * 2


@pytest.mark.parametrize("name", sorted(set(PASSING) - {"late"}))
def test_a_lasting_fault_ends_with_one_line_that_names_the_request(server, name):
    server.always = PASSING[name][0]
    with Setup(server.url, health_interval=0.01) as setup:
        # Servers that were excluded for their faults return.
        watch = setup.loop.spawn(setup.pool.monitor())
        setup.stream.start(prompts(1), SAMPLING, seed=1)
        with pytest.raises(
            EngineError, match=r"^sample 0/[01]: given up after 4 tries in \d+ s; the last: "
        ) as caught:
            setup.stream.take(1)
        watch.cancel()
    assert "\n" not in str(caught.value) and setup.client.counts["requests"] == 0


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422])
def test_a_request_that_is_refused_is_not_repeated(server, code):
    server.always = status(code)
    with Setup(server.url) as setup:
        setup.stream.start(
            prompts(1), SamplingParams(n_samples_per_prompt=1, max_response_length=4), seed=1
        )
        with pytest.raises(
            EngineError, match=rf"^sample 0/0: server {server.url}/generate: .*{code}"
        ):
            setup.stream.take(1)
    assert len(server.bodies) == 1


def test_the_requests_of_a_response_have_a_deadline_together(server):
    """Each may take two seconds; the last has what is left."""
    server.gate = False
    with Setup(server.url, retries=100, request_timeout=2.0, response_timeout=5.0) as setup:
        setup.pool.servers[0].failed_requests = -100
        setup.stream.start(
            prompts(1), SamplingParams(n_samples_per_prompt=1, max_response_length=4), seed=1
        )
        with pytest.raises(
            EngineError, match=r"^sample 0/0: given up after [23] tries in [5-7] s; .*no answer"
        ):
            setup.stream.take(1)
    assert 2 <= len(server.bodies) <= 3 and setup.client.counts["retries"] == len(server.bodies)
    server.gate = True


def test_a_failed_request_goes_to_another_server(server):
    with Generator() as bad:
        bad.always = status(500)
        with Setup(bad.url, server.url) as setup:
            wanted = prompts(4)
            setup.stream.start(wanted, SAMPLING, seed=1)
            check(setup.stream.take(4), wanted)
            assert not setup.pool.servers[0].alive, "four failures in a row"
            assert "words of the server" in setup.pool.servers[0].reason


def test_old_weights_never_serve(server):
    """A server with other weights is out at its first answer; nothing of it is taken."""
    with Generator() as old:
        old.version = "00c0ffee:2"
        with Setup(old.url, server.url) as setup:
            wanted = prompts(3)
            setup.stream.start(wanted, SAMPLING, seed=1)
            check(setup.stream.take(3), wanted)
            assert 1 <= setup.client.counts["stale_responses"] <= 6
            assert setup.pool.serving == setup.pool.servers[1:]
            assert setup.pool.stale == setup.pool.servers[:1]
            assert setup.client.counts["requests"] == 6


def test_where_all_have_old_weights_an_update_is_asked_for(server):
    server.version = "00c0ffee:2"
    with Setup(server.url) as setup:
        setup.stream.start(prompts(1), SAMPLING, seed=1)
        with pytest.raises(WeightsNeeded):
            setup.stream.take(1)
        server.version = "00c0ffee:4"
        setup.serve("00c0ffee:4")
        [group] = setup.stream.take(1)
    assert [sample.weight_version for sample in group] == [4, 4]


def test_a_version_that_no_update_mends_ends_the_run(server):
    server.version = "another-life:9"
    with Setup(server.url) as setup:
        setup.stream.start(
            prompts(1), SamplingParams(n_samples_per_prompt=1, max_response_length=4), seed=1
        )
        updates = 0

        def take_with_updates():
            nonlocal updates
            while True:
                try:
                    return setup.stream.take(1)
                except WeightsNeeded:
                    # Once more where `take` looks between the last answer and the request's end.
                    updates += 1
                    setup.serve()

        with pytest.raises(
            EngineError, match="sample 0/0: given up after 4 tries.*weights 'another-life:9'"
        ):
            take_with_updates()
        assert 3 <= updates <= 4


def test_the_prompt_of_a_group_is_computed_once_and_its_samples_follow(server):
    with Generator() as other, Setup(server.url, other.url) as setup:
        setup.client.model = served_model(max_length=1000)
        wanted = prompts(2, length=64)
        wanted = [Prompt(p.index, p.token_ids % 90 + 2, "") for p in wanted]
        setup.stream.start(
            wanted, SamplingParams(n_samples_per_prompt=3, max_response_length=4), seed=1
        )
        setup.stream.take(2)
        for bodies in (server.bodies, other.bodies):
            assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [0, 4, 4, 4]
            assert len({tuple(body["input_ids"]) for body in bodies}) == 1


def test_seeds_depend_on_seed_prompt_sample_and_token(server):
    def seeds(seed: int) -> list[int]:
        server.bodies.clear()
        with Setup(server.url) as setup:
            setup.stream.start(prompts(3), SAMPLING, seed=seed)
            setup.stream.take(3)
        return sorted(body["sampling_params"]["sampling_seed"] for body in server.bodies)

    first = seeds(1)
    assert len(set(first)) == 6 and all(0 <= seed < 2**63 for seed in first)
    assert seeds(1) == first and not set(seeds(2)) & set(first)
