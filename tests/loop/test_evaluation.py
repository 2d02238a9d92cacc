"""Held-out accuracy, when it is due, and how held-out responses are drawn."""

from __future__ import annotations

from collections import Counter

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.loop.evaluation import evaluate, evaluation_sampling, is_evaluation_due
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rollout.in_process_source import InProcessSource
from tests.support.samples import make_prompt
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_servers import scripted_response
from tests.support.training_runs import base_config


def response(prompt, number, seed):
    return scripted_response(prompt, number, 0)


PROMPTS = [make_prompt(i) for i in range(2)]


class Rewards:
    """Of (prompt, sample): one of four is solved, one could not be scored."""

    name = "verifier 'mine'"
    values = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): float("nan"), (1, 1): 0.0}

    def __call__(self, samples, prompts, timers):
        with timers("verify"):
            keys = zip(
                samples.table["prompt_index"].tolist(),
                samples.table["sample_index"].tolist(),
                strict=True,
            )
            rewards = np.array([self.values[key] for key in keys])
        return samples.with_rewards(rewards), Counter(timeout=1)


def config(**evaluation) -> Config:
    given = {"n_samples": 2, "temperature": 0.7, "pass_at_k": [1, 2], **evaluation}
    return Config.from_dict(base_config("model", "run", evaluation=given))


def test_accuracy_by_hand():
    source = InProcessSource(ScriptedEngine(response), vocab_size=1000)
    timers = Timers()
    source.submit(PROMPTS[:1], config().rollout, seed=0)
    metrics = evaluate(source, Rewards(), PROMPTS, config(), timers)
    assert metrics == {
        "eval/accuracy": 0.25,
        "eval/response_length": 4.0,
        "eval/verifier_failures": 1.0,
        "eval/pass@1": 0.25,
        "eval/pass@2": 0.5,
    }
    mixed = MixedPrompts({"a": PROMPTS[:1], "b": PROMPTS[:1]})
    by_source = evaluate(source, Rewards(), mixed, config(), Timers())
    assert (by_source["eval/accuracy/a"], by_source["eval/accuracy/b"]) == (0.5, 0.0)
    assert source.pending() == [0], "training groups stay in flight"
    assert set(timers.read_and_reset()) == {
        "time/evaluate",
        "time/step",
    }, "verification is part of the evaluation's time"


def test_two_evaluations_draw_the_same():
    seeds = []

    def script(prompt, number, seed):
        seeds.append(seed)
        return response(prompt, number, seed)

    source = InProcessSource(ScriptedEngine(script), vocab_size=1000)
    for _ in range(2):
        evaluate(source, Rewards(), PROMPTS, config(), Timers())
    assert len(set(seeds)) == 1


def test_due_at_the_interval_and_the_end():
    def due(**evaluation) -> list[int]:
        return [step for step in (1, 2, 3) if is_evaluation_due(config(**evaluation), step)]

    assert due(eval_interval=2, at_end=False) == [2] and due(eval_interval=2) == [2, 3]
    assert due(eval_interval=0, at_end=True) == [3] and due(eval_interval=0, at_end=False) == []


def test_held_out_responses_have_parameters_of_their_own():
    sampling = evaluation_sampling(config(top_p=0.9))
    assert (sampling.temperature, sampling.top_p, sampling.n_samples_per_prompt) == (0.7, 0.9, 2)
    assert sampling.max_response_length == 6 and not sampling.greedy
    assert evaluation_sampling(config(temperature=0.0, n_samples=1, pass_at_k=[])).greedy
