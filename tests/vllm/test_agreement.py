"""The server, Transformers in float64 and our Megatron model give the same log-probs for the
same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import everywhere
from tests.support.routing_cases import policy_of
from tests.support.server_agreement import (
    TOLERANCE,
    TRUNCATIONS,
    assert_agrees,
    check_supports,
)
from tests.support.server_clients import (
    VOCABULARY,
    checkpoint_stream,
    counts_of,
    engine_on,
    prompts_of,
)
from tests.support.server_engine import ServerEngine
from tests.support.server_teacher import assert_teachers_agree
from tests.support.ties import without_ties
from tests.support.transformers_reference import load_reference, response_log_probs


@pytest.fixture(scope="module")
def engine(vllm_server: LocalServers, vllm_model: str) -> Iterator[ServerEngine]:
    engine = engine_on(
        vllm_server.urls,
        vllm_model,
        kind="vllm",
        routes=False,
        top_log_probs=8,
        weight_transport="distributed",
        health_timeout=60.0,
    )
    engine.client.check_servers()
    engine.update_weights(checkpoint_stream(vllm_model), version=0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def samples(engine: ServerEngine, vllm_model: str) -> list[Sample]:
    """Short and long prompts, some with a prefix that the server has in its cache, several
    samples of each.
    """
    prompts = prompts_of([3, 7, 80, 300, 300], VOCABULARY, shared=3)
    prompts += [
        replace(p, index=p.index + 10)
        for p in prompts_of([290, 310], VOCABULARY, seed=1, shared=260)
    ]
    sampling = SamplingParams(n_samples_per_prompt=3, max_response_length=16, temperature=0.8)
    generated = engine.generate(prompts, sampling, seed=5)
    check_samples(generated, prompts, sampling, vocab_size=engine.client.model.vocab_size)
    assert counts_of(engine)["rollout/cached_share"] > 0.2
    return without_ties(load_reference(vllm_model), generated)


def test_transformers_scores_them_alike(samples: list[Sample], vllm_model: str) -> None:
    assert {sample.finish_reason for sample in samples} >= {"length"}
    assert all(sample.rollout_top_ids.shape[1] == 8 for sample in samples)
    assert_agrees(samples, load_reference(vllm_model), temperature=0.8)


def megatron(rank: int, world: int, path: str, samples: list[Sample]) -> list[np.ndarray]:
    policy = policy_of(path, parallel(tensor=2, expert=2))
    scores = compute_log_probs(
        policy, TrainingBatch.of(samples), micro_batches_of(800), temperature=0.8
    )
    return everywhere(scores.log_probs, samples, policy.groups)


def test_megatron_scores_them_alike(samples: list[Sample], vllm_model: str) -> None:
    for sample, values in zip(
        samples, run_distributed(megatron, 2, vllm_model, samples)[0], strict=True
    ):
        np.testing.assert_allclose(sample.rollout_log_probs, values, rtol=0, atol=TOLERANCE)


def test_greedy_log_probs_are_at_temperature_one(engine: ServerEngine, vllm_model: str) -> None:
    model = load_reference(vllm_model)
    sampling = SamplingParams(1, 12, temperature=0.0, top_p=0.5)
    generated = engine.generate(prompts_of([5, 70], VOCABULARY, seed=3), sampling, seed=2)
    assert_agrees(without_ties(model, generated), model, temperature=1.0)


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 5}], ids=["top_p", "top_k"])
def test_without_a_mask_there_are_no_log_probs(engine: ServerEngine, cut: dict[str, float]) -> None:
    """vLLM's would be over the tokens that are left."""
    prompts = prompts_of([5, 70], VOCABULARY, seed=3)
    sampling = SamplingParams(2, 8, **cut)
    generated = engine.generate(prompts, sampling, seed=2)
    check_samples(generated, prompts, sampling)
    assert all(sample.rollout_log_probs is None for sample in generated)


def test_an_end_token_ends_a_response(engine: ServerEngine) -> None:
    sampling = SamplingParams(n_samples_per_prompt=32, max_response_length=24, temperature=2.0)
    generated = engine.generate(prompts_of([5, 6], VOCABULARY, seed=9), sampling, seed=2)
    stopped = [sample for sample in generated if sample.finish_reason == "stop"]
    assert stopped and all(
        sample.response_ids[-1] == 1 and 1 not in sample.response_ids[:-1] for sample in stopped
    )
    assert all(
        1 not in sample.response_ids for sample in generated if sample.finish_reason != "stop"
    )


def test_a_seed_repeats_its_draws_whatever_runs_beside(engine: ServerEngine) -> None:
    prompts = prompts_of([20, 30, 40], VOCABULARY, seed=5)
    sampling = SamplingParams(n_samples_per_prompt=4, max_response_length=16)
    first = engine.generate(prompts, sampling, seed=7)
    alone = engine.generate(prompts[1:2], sampling, seed=7)
    assert [s.tokens.tolist() for s in alone] == [s.tokens.tolist() for s in first[4:8]]
    assert len({tuple(sample.tokens.tolist()) for sample in alone}) == 4
    other = engine.generate(prompts[1:2], sampling, seed=8)
    assert [s.tokens.tolist() for s in other] != [s.tokens.tolist() for s in alone]


def test_scores_of_given_tokens(engine: ServerEngine, vllm_model: str) -> None:
    """What a probe compares."""
    model = load_reference(vllm_model)
    prompts = prompts_of([2, 40, 90], VOCABULARY, seed=4)
    (log_probs,) = engine.score([prompt.token_ids for prompt in prompts]).values()
    for prompt, values in zip(prompts, log_probs, strict=True):
        size = prompt.length - 1
        as_sample = Sample(
            prompt.index, 0, prompt.token_ids, 1, np.ones(size, dtype=bool), None, "stop"
        )
        expected = response_log_probs(model, as_sample)[0].detach().numpy()
        np.testing.assert_allclose(values, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_the_ids_that_could_be_drawn(
    engine: ServerEngine, vllm_model: str, sampling: SamplingParams
) -> None:
    check_supports(engine, vllm_model, sampling)


def test_as_a_teacher_it_agrees_with_the_trainer(
    samples: list[Sample], vllm_server: LocalServers, vllm_model: str
) -> None:
    assert_teachers_agree(vllm_server.urls, vllm_model, "vllm", samples)
