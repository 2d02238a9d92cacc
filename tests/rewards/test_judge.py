"""A judge behind real HTTP servers: its scores, its rankings, and servers that fail."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from examples.judge.stand_in import ChatCompletions, Judge, verdict_of
from megatron_gspo.rewards.judge import (
    RANKING_TEMPLATE,
    SCORE_TEMPLATE,
    filled,
    ranking_of,
    scores_of_ranking,
)
from megatron_gspo.rewards.judge_servers import JudgeError
from megatron_gspo.rewards.scorer import RewardScorer, Scores
from megatron_gspo.rewards.verifiers import VerifierError, load_verifier
from tests.support.judge_server import JudgeServer, completion
from tests.support.ports import free_port
from tests.support.samples import make_prompt

EXAMPLES = Path(__file__).parents[2] / "examples" / "judge"
INSTRUCTIONS = "Score the response."


def asked(*responses: str, **fields: Any) -> list:
    """Requests of two responses a prompt."""
    prompts = []
    for i in range(len(responses)):
        prompt = make_prompt(index=i // 2, answer="4", **fields)
        prompt.messages = [{"role": "user", "content": f"question {i // 2}"}]
        prompts.append(prompt)
    return list(zip(responses, prompts, strict=True))


def scores_of(urls: list[str], *responses: str, verifier: str = "judge", **options: Any) -> Scores:
    """The scores of a new judge in this process."""
    settings = {"servers": urls, "model": "m", "instructions": INSTRUCTIONS, "backoff": 0.01}
    with RewardScorer(verifier, settings | options, timeout=None) as scorer:
        return scorer.score_texts(asked(*responses))


def length_of_response(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A score that tells which response was shown."""
    return {"reason": "its length", "score": len(text.partition("# Response\n\n")[2]) / 10}


def by_length(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A ranking in which longer is better."""
    shown = re.findall(r"# Response (\d+)\n\n(.*)", text)
    best = sorted(shown, key=lambda response: -len(response[1]))
    return {"reason": "longer", "best_to_worst": [int(number) for number, _ in best]}


def in_turn(*replies: Any):
    """Each reply once, the last for good; a function is called."""
    left = itertools.chain(replies, itertools.repeat(replies[-1]))

    def choose(text: str, schema: dict[str, Any]) -> Any:
        reply = next(left)
        return reply(text, schema) if callable(reply) else reply

    return choose


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_each_response_gets_the_score_of_its_own_verdict(timeout, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with JudgeServer(length_of_response) as server:
        options = {
            "servers": [server.url],
            "model": "big",
            "instructions": INSTRUCTIONS,
            "request": {"max_tokens": 300},
            "api_key_file": str(tmp_path / "key"),
        }
        with RewardScorer("judge", options, timeout=timeout) as scorer:
            assert scorer.needs_whole_batch
            assert scorer.description == f"the judge big answers at {server.url}"
            scores = scorer.score_texts(asked("a", "abc", "ab"))
            assert scorer.score_texts([]).rewards.size == 0
    np.testing.assert_allclose(scores.rewards, [0.1, 0.3, 0.2], rtol=1e-6)
    body = min(server.bodies, key=lambda body: len(body["messages"][1]["content"]))
    assert body["model"] == "big" and body["temperature"] == 0.0 and body["max_tokens"] == 300
    assert body["messages"] == [
        {"role": "system", "content": INSTRUCTIONS},
        {
            "role": "user",
            "content": "# Question\n\nquestion 0\n\n# Reference answer\n\n4\n\n# Response\n\na",
        },
    ]
    assert set(body["response_format"]["json_schema"]["schema"]["required"]) == {"reason", "score"}
    assert server.keys == ["Bearer secret"] * 3


def test_the_same_request_is_asked_once_and_another_prompt_is_another_request(tmp_path):
    cache = str(tmp_path / "answers.db")
    settings = {"model": "m", "instructions": INSTRUCTIONS, "cache": cache}
    with JudgeServer(length_of_response) as server:
        options = {**settings, "servers": [server.url]}
        with RewardScorer("judge", options, timeout=None) as scorer:
            assert (
                scorer.score_texts(asked("aa", "aa", "aa")).rewards.tolist()
                == [pytest.approx(0.2)] * 3
            )
            assert len(server.bodies) == 2, "two prompts"
            scorer.score_texts(asked("aa", "a"))
            assert len(server.bodies) == 3
        scores_of([server.url], "a", cache=cache, instructions="Be strict.")
        assert len(server.bodies) == 4, "other instructions are another request"
    # A judge that is down is not needed for what is known.
    assert scores_of([server.url], "a", cache=cache).rewards.tolist() == [pytest.approx(0.1)]


def choice_of(message: dict[str, Any]) -> web.Response:
    return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})


FAILING = {
    "busy": web.Response(status=429, text="slow down"),
    "broken": web.Response(status=500),
    "overloaded": web.Response(status=503),
    "no JSON": "I would say 0.5.",
    "other JSON": "[0.5]",
    "a score out of range": {"reason": "", "score": 7},
    "no reason": {"score": 0.5},
    "another field": {"reason": "", "score": 0.5, "mood": "good"},
    "cut off": completion('{"reason": "", "score": 0.9}', "length"),
    "refused": choice_of({"content": None, "refusal": "I can't help\nwith that."}),
    "filtered": completion('{"reason": "', "content_filter"),
    "no completion": web.json_response({"object": "error"}),
    "no text": choice_of({"content": None}),
}


@pytest.mark.parametrize("reply", FAILING.values(), ids=FAILING.keys())
def test_a_failure_is_asked_again(reply):
    with JudgeServer(in_turn(copy_of(reply), copy_of(reply), length_of_response)) as server:
        assert scores_of([server.url], "abc").rewards.tolist() == [pytest.approx(0.3)]
    assert len(server.bodies) == 3


def copy_of(reply: Any):
    """A response object can be sent once."""
    if not isinstance(reply, web.Response):
        return reply
    return lambda text, schema: web.Response(
        status=reply.status, body=reply.body, content_type=reply.content_type
    )


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (FAILING["broken"], "no answer after 3 attempts (server http://127.0.0.1"),
        (FAILING["no JSON"], "the answer breaks its schema (Invalid JSON"),
        (FAILING["a score out of range"], "the answer breaks its schema (score: "),
        (FAILING["cut off"], "the answer was cut off; give it more tokens"),
        (FAILING["no completion"], "the reply is no chat completion"),
        (FAILING["refused"], "the judge refused (I can't help with that.)"),
        (FAILING["filtered"], "the answer was cut off by a content filter"),
    ],
)
def test_a_response_without_an_answer_has_no_reward_and_the_others_have_theirs(reply, words):
    failing = copy_of(reply)

    def choose(text: str, schema: dict[str, Any]) -> Any:
        if not text.endswith("bad"):
            return length_of_response(text, schema)
        return failing(text, schema) if callable(failing) else failing

    with JudgeServer(choose) as server:
        scores = scores_of([server.url], "a", "bad", "ab")
    np.testing.assert_allclose(scores.rewards, [0.1, np.nan, 0.2], rtol=1e-6)
    assert scores.counts == {"error": 1, "timeout": 0, "invalid": 0}
    assert words in scores.messages[1] and len(server.bodies) == 2 + 3


@pytest.mark.parametrize(
    ("status", "words"),
    [(400, "answered 400: too long"), (401, "set verifier_options.api_key_file")],
)
def test_a_request_that_is_refused_is_not_sent_again(status, words):
    with JudgeServer(in_turn(copy_of(web.Response(status=status, text="too long")))) as server:
        scores = scores_of([server.url], "a")
    assert np.isnan(scores.rewards[0]) and words in scores.messages[0]
    assert len(server.bodies) == 1


def test_a_server_that_hangs_is_left_for_another():
    with JudgeServer(in_turn(None)) as hanging, JudgeServer(length_of_response) as server:
        scores = scores_of([hanging.url, server.url], "a", "ab", request_timeout=2.0)
        assert hanging.asked.is_set()
    np.testing.assert_allclose(scores.rewards, [0.1, 0.2], rtol=1e-6)


def test_a_judge_that_hangs_on_half_of_the_responses_scores_the_others():
    def choose(text: str, schema: dict[str, Any]) -> Any:
        return None if text.endswith("b") else length_of_response(text, schema)

    with JudgeServer(choose) as server:
        scores = scores_of([server.url], "a", "b", "aa", "ab", request_timeout=4.0, attempts=1)
    np.testing.assert_allclose(scores.rewards, [0.1, np.nan, 0.2, np.nan], rtol=1e-6)
    assert scores.messages[1] == (
        f"JudgeError: no answer after 1 attempt (server {server.url}/v1/chat/completions: no answer"
        " within 4 s)"
    )


def test_a_server_that_hangs_until_the_limit_is_named():
    with JudgeServer(in_turn(None)) as hanging:
        scores = scores_of([hanging.url], "a", time_limit=0.3)
    assert scores.messages[0] == (
        f"JudgeError: no answer within 0.3 s (server {hanging.url}: it has not answered yet)"
    )


def test_a_dead_server_does_not_count_while_another_lives():
    dead = f"http://127.0.0.1:{free_port()}"
    with JudgeServer(length_of_response) as server:
        scores = scores_of([dead, server.url], *("a" * n for n in range(1, 9)), attempts=1)
    np.testing.assert_allclose(scores.rewards, np.arange(1, 9) / 10, rtol=1e-6)


def test_a_server_that_returns_is_asked_again():
    """It is away for longer than all attempts at a living server would take."""
    refusals = threading.Event()
    count = itertools.count(1)

    def away_ten_times(text: str, schema: dict[str, Any]) -> Any:
        if next(count) <= 10:
            return web.Response(status=503, text="starting")
        refusals.set()
        return length_of_response(text, schema)

    with JudgeServer(away_ten_times) as server:
        scores = scores_of([server.url], "abc", attempts=2, backoff=0.001)
    assert refusals.is_set() and scores.rewards.tolist() == [pytest.approx(0.3)]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_judge_that_is_down_leaves_responses_out_within_the_limit(timeout):
    dead = f"http://127.0.0.1:{free_port()}"
    options = {"servers": [dead], "model": "m", "instructions": INSTRUCTIONS, "time_limit": 0.3}
    with RewardScorer("judge", options, timeout=timeout) as scorer:
        scores = scorer.score_texts(asked("a", "b"))
    assert np.isnan(scores.rewards).all() and scores.counts["error"] == 2
    assert scores.messages[0] == (
        f"JudgeError: no answer within 0.3 s (server {dead}/v1/chat/completions: no connection"
        " (connection refused))"
    )


def test_requests_in_flight_are_limited_and_shared_among_servers():
    with JudgeServer(length_of_response) as first, JudgeServer(length_of_response) as second:
        texts = ["a" * n for n in range(1, 10)]
        scores_of([first.url, f"{second.url}/v1/"], *texts, concurrency=4)
    assert len(first.bodies) + len(second.bodies) == 9
    assert min(len(first.bodies), len(second.bodies)) >= 2
    assert first.most_in_flight + second.most_in_flight <= 4


def test_the_example_of_a_verdict_and_a_template_of_ones_own():
    def grade(text: str, schema: dict[str, Any]) -> dict[str, str]:
        assert list(schema["properties"]) == ["wrong_facts", "grade"]
        assert text.startswith("be kind: ")
        return {"wrong_facts": "", "grade": text.partition(": ")[2]}

    with JudgeServer(grade) as server:
        options = {
            "servers": [server.url],
            "model": "m",
            "instructions": INSTRUCTIONS,
            "template": "{rubric}: {response}",
            "verdict": f"{EXAMPLES}/grade.py:Grade",
            "attempts": 1,
        }
        with RewardScorer("judge", options, timeout=None) as scorer:
            scores = scorer.score_texts(asked("good", "fair", "awful", rubric="be kind"))
            missing = scorer.score_texts(asked("good"))
    np.testing.assert_equal(scores.rewards, np.float32([1.0, 0.4, np.nan]))
    assert "the answer breaks its schema (grade: " in scores.messages[2]
    assert "prompt 0 has no 'rubric', which verifier_options.template names" in missing.messages[0]
    with pytest.raises(VerifierError, match=r"it must be a class of pydantic\.BaseModel with a"):
        load_verifier("judge", options | {"verdict": f"{EXAMPLES}/paraphrases.py:Comparison"})


def test_the_example_of_a_judge_of_ones_own():
    def compare(text: str, schema: dict[str, Any]) -> Any:
        first, second = re.findall(r"# (?:First|Second)\n\n(.*)", text)
        if "refused" in (first, second):
            return web.Response(status=400)
        return {"means_the_same": first in second}

    with JudgeServer(compare) as server:
        options = {"servers": [server.url], "model": "m"}
        with RewardScorer(f"{EXAMPLES}/paraphrases.py:paraphrases", options) as scorer:
            scores = scorer.score_texts(asked("4", "4 or 5", "6", "refused"))
    np.testing.assert_equal(scores.rewards, np.float32([1.0, 0.5, 0.0, np.nan]))
    assert scores.messages[3].startswith("JudgeError: server http://127.0.0.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"servers": "http://a"}, "give a list of addresses"),
        ({"servers": []}, "give a list of addresses"),
        ({"servers": ["a:80"]}, "give http://host:port"),
        ({"attempts": 0}, "both must be at least 1"),
        ({"api_key_file": "absent"}, "No such file or directory: 'absent'"),
        ({"cache": "absent/answers.db"}, "name a file that can be written"),
        ({"tries": 3}, "don't fit"),
    ],
)
@pytest.mark.parametrize("verifier", ["judge", "judge_ranking"])
def test_a_wrong_option_is_refused_at_the_start(verifier, options, words):
    right = {"servers": ["http://a"], "model": "m", "instructions": INSTRUCTIONS}
    with pytest.raises(VerifierError, match=re.escape(words)) as raised:
        load_verifier(verifier, right | options)
    assert "\n" not in str(raised.value)


def test_the_template_is_filled_once():
    """What a response or a field says in braces is not replaced, and other braces stay."""
    prompt = make_prompt(answer="{response}", rubric="{answer}")
    prompt.messages = [{"role": "user", "content": "q"}]
    text = filled(
        '{"score": 1} {rubric} {answer} {question} {response}', prompt, response="{question}"
    )
    assert text == '{"score": 1} {answer} {response} q {question}'
    prompt.answer = None
    with pytest.raises(JudgeError, match="prompt 0 has no 'answer'"):
        filled("{answer}", prompt, response="")
    prompt.messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert filled("{reference}{question}", prompt) == "system: s\n\nuser: q"


def test_the_best_of_a_prompt_gets_one_and_the_worst_nothing():
    with JudgeServer(by_length) as server:
        scores = scores_of(
            [server.url], "aaa", "a", "b", "b", "cc", "cccc", verifier="judge_ranking"
        )
    np.testing.assert_allclose(scores.rewards, [1, 0, 0.5, 0.5, 0, 1])
    assert len(server.bodies) == 2, "one request a prompt, none where all responses are equal"


def test_equal_responses_share_a_rank_and_the_order_shown_is_that_of_the_texts():
    def request_of(*texts: str) -> tuple[list[float], str]:
        with JudgeServer(by_length) as server:
            options = {"servers": [server.url], "model": "m", "instructions": INSTRUCTIONS}
            prompt = asked("")[0][1]
            with RewardScorer("judge_ranking", options, timeout=None) as scorer:
                scores = scorer.score_texts([(text, prompt) for text in texts])
        [body] = server.bodies
        return scores.rewards.tolist(), body["messages"][1]["content"]

    rewards, shown = request_of("aaa", "a", "aa", "aaa", "aaaa")
    assert rewards == pytest.approx([2 / 3, 0, 1 / 3, 2 / 3, 1])
    rewards, shown_again = request_of("aaaa", "aa", "a", "aaa")
    assert rewards == pytest.approx([1, 1 / 3, 0, 2 / 3]) and shown_again == shown


@pytest.mark.parametrize("numbers", [[1], [1, 1], [0, 1], [1, 2, 1]])
def test_a_ranking_that_is_none_leaves_its_prompt_out(numbers):
    def choose(text: str, schema: dict[str, Any]) -> Any:
        if "question 0" in text:
            return by_length(text, schema)
        return {"reason": "", "best_to_worst": numbers}

    with JudgeServer(choose) as server:
        scores = scores_of([server.url], "a", "aa", "b", "bb", verifier="judge_ranking", attempts=1)
    np.testing.assert_equal(scores.rewards, np.float32([0, 1, np.nan, np.nan]))
    assert "the answer breaks its schema (best_to_worst" in scores.messages[2]


def test_the_schema_of_a_ranking_bounds_its_numbers():
    numbers = ranking_of(4).model_json_schema()["properties"]["best_to_worst"]
    assert (numbers["minItems"], numbers["maxItems"]) == (4, 4)
    assert (numbers["items"]["minimum"], numbers["items"]["maximum"]) == (1, 4)


def test_scores_of_a_ranking_by_hand():
    assert scores_of_ranking([3, 1, 2], ["x", "y", "z"]) == {"z": 1.0, "x": 0.5, "y": 0.0}


def test_the_stand_in_has_room_for_all_connections_of_a_client():
    """Those beyond it would wait for the system's next attempts, for up to a minute a step."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Judge(("127.0.0.1", 0), ChatCompletions))
        for _ in range(64):  # nobody accepts them
            address = ("127.0.0.1", server.server_port)
            stack.enter_context(socket.create_connection(address, timeout=0.5))


def test_the_stand_in_reads_one_response_or_several():
    prompt = make_prompt(answer="nus")
    prompt.messages = [{"role": "user", "content": "sun backward?"}]
    one = filled(SCORE_TEMPLATE, prompt, response="nub")
    assert verdict_of(one)["score"] == pytest.approx(2 / 3)
    shown = "# Response 1\n\nnub\n\n# Response 2\n\n\n\n# Response 3\n\nnus"
    several = filled(RANKING_TEMPLATE, prompt, responses=shown)
    assert verdict_of(several)["best_to_worst"] == [3, 1, 2]
