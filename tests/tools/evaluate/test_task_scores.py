"""Scores of kept responses, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.config import DataConfig
from megatron_gspo.data.sample import Prompt
from megatron_gspo.tools.compare.statistics import bootstrap_interval
from megatron_gspo.tools.evaluate.results import print_scores
from megatron_gspo.tools.evaluate.task_files import Task
from megatron_gspo.tools.evaluate.task_scores import (
    prompt_accuracy,
    score_task,
)

REWARDS = {0: [1.0, 0.0, 0.0, 1.0], 1: [0.0, 0.0, 0.0, 0.0], 2: [0.0, 0.5, 1.0, None]}


def records(rewards=REWARDS):
    def record(index, sample, reward):
        failed = {"verifier_failure": "timeout: 10 s"} if reward is None else {}
        return {
            "prompt_index": index,
            "sample_index": sample,
            "reward": reward,
            "response_length": 10 * (index + 1),
            "finish_reason": "length" if index == 1 else "stop",
            "metadata": failed,
        }

    return {
        index: [record(index, i, reward) for i, reward in enumerate(row)]
        for index, row in rewards.items()
    }


def task(count):
    prompts = [Prompt(i, np.array([1]), "") for i in range(count)]
    return Task("numbers", DataConfig(prompts="x"), tuple(prompts), {"no tests": 2})


def test_scores_by_hand():
    scores = score_task(task(3), "step_000002", 2, records(), (1, 2))
    assert (scores.task, scores.label, scores.step, scores.prompts, scores.samples) == (
        "numbers",
        "step_000002",
        2,
        3,
        4,
    )
    # the response without a score counts as not solved
    assert scores.accuracy.mean == pytest.approx((0.5 + 0 + 1.5 / 4) / 3)
    assert (scores.failures, scores.left_out) == (1, {"no tests": 2})
    # pass@2 of 4: 2 successes miss with 1/6, one success with 1/2; a reward of 0.5 is no success
    assert scores.pass_at_k[2].mean == pytest.approx((5 / 6 + 0 + 1 / 2) / 3)
    assert scores.pass_at_k[1].mean == pytest.approx((1 / 2 + 0 + 1 / 4) / 3)
    assert scores.response_length == 20 and scores.truncated == pytest.approx(1 / 3)
    assert scores.difference is None and scores.verifier == "exact_match"


def test_the_interval_is_over_prompts_not_responses():
    rewards = {i: [float(i % 2)] * 50 for i in range(20)}
    scores = score_task(task(20), "m", None, records(rewards))
    # Of 20 values, not 1000.
    assert (scores.accuracy.low, scores.accuracy.high) == pytest.approx((0.3, 0.7), abs=0.051)
    assert scores.accuracy.count == 20


def test_differences_are_paired():
    rng = np.random.default_rng(0)
    first = rng.random((40, 1))
    second = {i: [float(value + 0.1)] for i, value in enumerate(first[:, 0])}
    scores = score_task(task(40), "m", None, records(second), first=prompt_accuracy(first))
    # each prompt gains the same: no spread, though the accuracies overlap
    assert (scores.difference.low, scores.difference.high) == pytest.approx((0.1, 0.1))
    assert scores.accuracy.low < bootstrap_interval(first[:, 0]).high


def test_rewards_beyond_0_to_1_are_no_percentages(capsys):
    print_scores([score_task(task(2), "model", None, records({0: [-2.0, -3.0], 1: [-2.0, -3.0]}))])
    print_scores([score_task(task(2), "model", None, records({0: [1.0, 0.0], 1: [1.0, 0.0]}))])
    rewards, accuracies = capsys.readouterr().out.splitlines()
    assert "mean reward -2.500 [-2.500, -2.500]" in rewards
    assert "%" not in rewards and "pass@" not in rewards
    assert "mean@2 50.0 [50.0, 50.0] %, pass@2 100.0 [100.0, 100.0]" in accuracies
