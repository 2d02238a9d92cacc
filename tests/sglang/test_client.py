"""The client of real servers: responses across updates, the prefix cache and seeds.

Faults between the two: tests/rollout/server_engine and test_faults_in_runs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.server_engine import response_generator
from tests.support import faulty_requests
from tests.support.server_clients import (
    VOCABULARY,
    checkpoint_stream,
    counts_of,
    draw,
    engine_on,
    prompts_of,
)
from tests.support.server_engine import ServerEngine


@pytest.fixture(scope="module")
def engine(sglang_url: str, sglang_model: str) -> Iterator[ServerEngine]:
    engine = engine_on([sglang_url], sglang_model, health_timeout=20.0)
    engine.update_weights(checkpoint_stream(sglang_model), version=0)
    yield engine
    engine.close()


def test_an_interrupted_response_goes_on_under_new_weights(engine, sglang_model):
    faulty_requests.continue_under_new_weights(engine, sglang_model, length=350)


def test_priming_a_prompt_raises_what_is_cached(engine, sglang_model, monkeypatch):
    sampling = SamplingParams(n_samples_per_prompt=4, max_response_length=4)

    def cached(seed: int) -> float:
        counts_of(engine)
        draw(engine, sglang_model, prompts_of([130] * 3, VOCABULARY, seed=seed), sampling)
        return counts_of(engine)["rollout/cached_share"]

    primed = cached(21)
    monkeypatch.setattr(response_generator, "_MIN_PREFILL_TOKENS", 10**6)
    assert primed > 0.9 and primed > cached(22)


def test_seeds_repeat_draws_where_the_server_heeds_them(engine, sglang_model):
    """This server doesn't (it needs --enable-deterministic-inference): sampled draws differ,
    greedy ones don't.
    """
    prompts = prompts_of([20, 30], VOCABULARY, seed=5)
    greedy = SamplingParams(n_samples_per_prompt=2, max_response_length=16, temperature=0.0)
    first, again = (draw(engine, sglang_model, prompts, greedy) for _ in range(2))
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    assert first[0].tokens.tolist() == first[1].tokens.tolist()
    sampled = draw(
        engine,
        sglang_model,
        prompts,
        SamplingParams(n_samples_per_prompt=4, max_response_length=16),
    )
    assert len({tuple(sample.tokens.tolist()) for sample in sampled}) > 4, (
        "two may be equal if they end at once"
    )
