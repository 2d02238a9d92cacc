"""Episodes on a model, alone and over several ranks."""

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.rollout.engine_protocol import RolloutEngine, SamplingParams
from megatron_gspo.rollout.sample_exchange import generate_on_ranks
from tests.rollout.embedded.test_route_recorder import naive_routes
from tests.support.distributed import run_distributed
from tests.support.random_samples import all_samples, assert_same
from tests.support.reference_models import prompts, teacher_forced
from tests.support.scripted_episodes import Depends, engine_and_reference, playing


def test_episodes_on_a_model_are_those_of_one_plain_pass():
    """Log-probs and routes of every generated token, independent of earlier calls."""
    engine, reference = engine_and_reference()
    episodes = playing(engine, Depends(), RunLimits(max_calls=3, max_call_length=8, max_context=60))
    assert isinstance(episodes, RolloutEngine)
    questions = prompts(8)
    sampling = SamplingParams(3, 40, temperature=0.8)
    samples = episodes.generate(questions, sampling, seed=5)
    assert [(s.prompt_index, s.sample_index) for s in samples] == [
        (q.index, i) for q in questions for i in range(3)
    ]
    assert {len(spans(s)) for s in samples} == {1, 2, 3}
    for sample in samples:
        sample.check()
        wanted = teacher_forced(reference, sample, 0.8)
        generated = sample.loss_mask
        np.testing.assert_allclose(
            sample.rollout_log_probs[generated], wanted[generated], atol=2e-5
        )
        assert not sample.rollout_log_probs[~generated].any()
        assert (~generated).sum() == sum(
            b.start - a.end for a, b in zip(spans(sample), spans(sample)[1:], strict=False)
        )
        np.testing.assert_array_equal(
            np.sort(sample.routed_experts, -1), naive_routes(reference, sample.tokens)
        )


def over_ranks(rank, world_size):
    engine, _ = engine_and_reference()
    episodes = playing(engine, Depends(), RunLimits(max_calls=3, max_call_length=8, max_context=60))
    questions = prompts(5)
    sampling = SamplingParams(2, 40)
    whole = episodes.generate(questions, sampling, seed=1)
    batch = generate_on_ranks(
        episodes, questions, sampling, seed=1, group=dist.group.WORLD, vocab_size=40
    )
    for a, b in zip(all_samples(batch), whole, strict=True):
        np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
        assert_same(replace(a, rollout_log_probs=b.rollout_log_probs), b)
    return len(batch)


def test_episodes_over_ranks_are_those_of_one():
    assert run_distributed(over_ranks, 2) == [10, 10]
