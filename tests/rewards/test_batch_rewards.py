"""Rewards of a whole batch: the example, in a worker and in this process, sync and async, and what
a call that fails or returns too little does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.rewards.scorer import RewardScorer
from tests.support.samples import make_prompt

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/own_code/batch_reward.py:brief_answers"
SOURCE = """
import asyncio, time

calls = 0

async def judged(responses, prompts, *, scale=1.0):
    global calls
    calls += 1
    async def judge(response, prompt):
        await asyncio.sleep(0)
        return None if response == "skip" else scale * float(response == prompt.answer) + calls
    return await asyncio.gather(*map(judge, responses, prompts))

async def named(responses, prompts):
    async def judge(response):
        if response == "5":
            raise ValueError("no verdict")
        return 1.0
    return await asyncio.gather(*map(judge, responses), return_exceptions=True)

def too_few(responses, prompts):
    return [1.0]

def one_number(responses, prompts):
    return 1.0

def broken(responses, prompts):
    raise ValueError("no judge")

def slow(responses, prompts):
    time.sleep(60)

judged.description = "judges all at once"
"""


def requests(*texts: str):
    return [(text, make_prompt(index=i // 2, answer="4")) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_the_example_ranks_the_right_answers_to_a_prompt(timeout):
    with RewardScorer(EXAMPLE, {"bonus": 0.5}, timeout=timeout) as scorer:
        assert scorer.takes_batch
        scores = scorer.score_texts(requests("4", "4 ", "5", " 4"))
        assert scorer.score_texts([]).rewards.size == 0
    np.testing.assert_allclose(scores.rewards, [1.5, 1.25, 0.0, 1.5])


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_one_call_and_a_response_without_a_reward(own, timeout):
    with RewardScorer(f"{own}:judged", {"scale": 0.5}, timeout=timeout) as scorer:
        assert scorer.description == "judges all at once"
        scores = scorer.score_texts(requests("4", "skip", "5"))
    np.testing.assert_equal(scores.rewards, np.float32([1.5, np.nan, 1.0]))
    assert scores.counts == {"error": 0, "timeout": 0, "invalid": 1}


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_an_exception_in_the_list_is_the_reason_of_its_response(own, timeout):
    with RewardScorer(f"{own}:named", timeout=timeout) as scorer:
        scores = scorer.score_texts(requests("4", "5"))
    np.testing.assert_equal(scores.rewards, np.float32([1.0, np.nan]))
    assert scores.messages == ("", "ValueError: no verdict") and scores.counts["error"] == 1


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("too_few", "invalid", "returned 1 rewards for 3 responses; return one for each"),
        ("one_number", "invalid", "returned the float 1.0; return a list"),
        ("broken", "error", "ValueError: no judge"),
        ("slow", "timeout", "no result after 2 s"),
    ],
)
def test_a_call_that_fails_leaves_all_responses_without_a_reward(own, function, status, words):
    with RewardScorer(f"{own}:{function}", timeout=2.0) as scorer:
        scores = scorer.score_texts(requests("4", "5", "6"))
    assert scores.counts[status] == 3 and np.isnan(scores.rewards).all()
    assert all(words in message for message in scores.messages)
