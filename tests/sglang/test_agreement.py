"""The server, Transformers in float64 and our Megatron model give the same log-probs and routes
for the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.train_step import compute_log_probs
from megatron_gspo.rollout.sample_checks import check_samples
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import all_routes, everywhere
from tests.support.routing_cases import policy_of, shape_of
from tests.support.server_agreement import (
    TOLERANCE,
    TRUNCATIONS,
    assert_agrees,
    bare,
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
def engine(sglang_url: str, sglang_model: str) -> Iterator[ServerEngine]:
    engine = engine_on([sglang_url], sglang_model, top_log_probs=8)
    engine.update_weights(checkpoint_stream(sglang_model), version=0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def samples(engine: ServerEngine, sglang_model: str) -> list[Sample]:
    """Short and long prompts, some with a prefix that the server has in its cache, several
    samples of each.
    """
    prompts = prompts_of([3, 7, 80, 80, 120, 90], VOCABULARY, shared=3)
    prompts += [
        replace(p, index=p.index + 10)
        for p in prompts_of([100, 110, 64], VOCABULARY, seed=1, shared=60)
    ]
    sampling = SamplingParams(n_samples_per_prompt=4, max_response_length=24, temperature=0.8)
    generated = engine.generate(prompts, sampling, seed=5) + engine.generate(
        prompts, sampling, seed=6
    )
    check_samples(generated, prompts + prompts, sampling, vocab_size=engine.client.model.vocab_size)
    assert counts_of(engine)["rollout/cached_share"] > 0.5
    return without_ties(load_reference(sglang_model), generated)


def test_transformers_scores_them_alike_and_takes_the_same_routes(
    samples: list[Sample], sglang_model: str
) -> None:
    assert all(sample.missing_routes is None for sample in samples)
    assert all(sample.rollout_top_ids.shape[1] == 8 for sample in samples)
    assert sum(np.prod(sample.routed_experts.shape[:2]) for sample in samples) > 7_500
    assert_agrees(samples, load_reference(sglang_model), temperature=0.8)


def megatron(
    rank: int, world: int, path: str, samples: list[Sample]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    policy = policy_of(path, parallel(tensor=2, expert=2))
    options = ReplayOptions(shape_of(policy), record=True)
    scores = compute_log_probs(
        policy, TrainingBatch.of(samples), micro_batches_of(400), temperature=0.8, routing=options
    )
    return (
        everywhere(scores.log_probs, samples, policy.groups),
        all_routes(scores.routing, samples, range(len(samples)))[0],
    )


def test_megatron_scores_them_alike_and_takes_the_same_routes(
    samples: list[Sample], sglang_model: str
) -> None:
    plain = [bare(sample) for sample in samples]
    log_probs, routes = run_distributed(megatron, 2, sglang_model, plain)[0]
    for sample, values, chosen in zip(samples, log_probs, routes, strict=True):
        np.testing.assert_allclose(sample.rollout_log_probs, values, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), np.sort(chosen, -1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n_samples_per_prompt=2, max_response_length=12, temperature=0.0),
        SamplingParams(n_samples_per_prompt=2, max_response_length=12, temperature=1.3, top_p=0.7),
        SamplingParams(n_samples_per_prompt=2, max_response_length=12, top_k=5),
    ],
    ids=["greedy", "top_p", "top_k"],
)
def test_log_probs_are_those_of_the_whole_vocabulary(
    engine: ServerEngine, sglang_model: str, sampling: SamplingParams
) -> None:
    model = load_reference(sglang_model)
    generated = engine.generate(prompts_of([5, 70], VOCABULARY, seed=3), sampling, seed=2)
    assert_agrees(without_ties(model, generated), model, temperature=sampling.scoring_temperature)


def test_scores_of_given_tokens(engine: ServerEngine, sglang_model: str) -> None:
    """What a probe compares."""
    model = load_reference(sglang_model)
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
    engine: ServerEngine, sglang_model: str, sampling: SamplingParams
) -> None:
    check_supports(engine, sglang_model, sampling)


def test_as_a_teacher_it_agrees_with_the_trainer(
    samples: list[Sample], sglang_url: str, sglang_model: str
) -> None:
    assert_teachers_agree([sglang_url], sglang_model, "sglang", samples)
