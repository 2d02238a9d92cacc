"""What is read from vLLM's answers, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.server_api import InputScores, ResponseError, ResponsePart
from megatron_gspo.rollout.vllm import response_parser
from megatron_gspo.routing_replay.routes import MISSING, as_routes
from tests.support.served_models import served_model
from tests.support.sglang_responses import MODEL, asked
from tests.support.vllm_responses import VERSION, npy, vllm_answer

PLAIN = served_model()
TOKENS = [7, 9, 1]
LOG_PROBS = [-0.5, -1.25, -0.125]


def parse(answer: dict[str, Any], **context: Any) -> ResponsePart:
    """Five tokens sent, four at most requested."""
    given = asked(**{"model": PLAIN, **context})
    response = response_parser.decode_response(json.dumps(answer).encode(), given)
    response_parser.response_version(response, given)
    return response_parser.parse_response(response, given)


def test_a_right_answer():
    response = parse(vllm_answer(TOKENS, LOG_PROBS))
    assert response.tokens.tolist() == TOKENS and response.tokens.dtype == np.int64
    assert response.log_probs.tolist() == LOG_PROBS and response.log_probs.dtype == np.float32
    assert (response.finish_reason, response.routes, response.cached) == ("stop", None, 2)
    assert parse(vllm_answer(TOKENS, LOG_PROBS), log_probs=False).log_probs is None


REFUSED = {
    "not a number": (
        vllm_answer(TOKENS, [-0.5, -9999.0, -1.0]),
        "the log-prob -9999 came back, which vLLM sends in",
    ),
    "positive": (vllm_answer(TOKENS, [-0.5, 0.5, -1.0]), "the log-prob 0.5 came back"),
    "another token": (
        vllm_answer(TOKENS, LOG_PROBS, token_ids=[7, 8, 1]),
        "token_ids and logprobs disagree",
    ),
    "a token too many": (
        vllm_answer(
            TOKENS,
            LOG_PROBS,
            token_ids=[*TOKENS, 1],
            weight_versions=[{"version": VERSION, "start": 0, "end": 4}],
        ),
        "disagree",
    ),
    "no log-probs": (vllm_answer(TOKENS, LOG_PROBS, logprobs=None), "no logprobs came back"),
    "no tokens": (vllm_answer([], [], "length", token_ids=None), "weight_version"),
    "foreign token": (
        vllm_answer([7, 96, 1], LOG_PROBS),
        "token id 96 came back; the vocabulary has 96",
    ),
    "too long": (vllm_answer([7] * 5, [-1.0] * 5, "length"), "5 tokens came back, at most 4"),
    "cut early": (vllm_answer([7], [-1.0], "length"), "cut off for its length after 1 of 4"),
    "stopped elsewhere": (
        vllm_answer([7, 8], [-1.0] * 2),
        "stopped on 8, which is not an end token",
    ),
    "another reason": (
        vllm_answer(TOKENS, LOG_PROBS, "repetition"),
        "finish_reason is 'repetition'",
    ),
    "two choices": (
        {"choices": vllm_answer(TOKENS, LOG_PROBS)["choices"] * 2},
        "2 choices came back",
    ),
    "no version": (vllm_answer(TOKENS, LOG_PROBS, weight_versions=None), "no weight_version"),
    "two versions": (
        vllm_answer(
            TOKENS,
            LOG_PROBS,
            weight_versions=[
                {"version": VERSION, "start": 0, "end": 1},
                {"version": "x:4", "start": 1, "end": 3},
            ],
        ),
        f"the weights changed from 'x:4' to '{VERSION}' within it",
    ),
    "a version of some": (
        vllm_answer(
            TOKENS, LOG_PROBS, weight_versions=[{"version": VERSION, "start": 0, "end": 2}]
        ),
        "not of all tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_answer_is_refused_by_name(case):
    answer, message = REFUSED[case]
    with pytest.raises(ResponseError, match="^sample 7/2: ") as caught:
        parse(answer)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_request_that_was_aborted_before_its_first_token():
    for tokens, expected in (([], True), ([7], False)):
        answer = vllm_answer(tokens, [-1.0] * len(tokens), "abort")
        response = response_parser.decode_response(json.dumps(answer).encode(), asked(model=PLAIN))
        assert response_parser.is_empty(response, asked(model=PLAIN)) is expected
    assert parse(vllm_answer([7], [-1.0], "abort")).finish_reason == "abort"


# 5 + 3 - 1 rows, three layers of which the second is dense.
ROUTES = (np.arange(7 * 3 * 2) * 5 % 8).reshape(7, 3, 2)
MOE = ROUTES[:, [0, 2]]


def routed(part: Any, **top: Any) -> ResponsePart:
    return parse(vllm_answer(TOKENS, LOG_PROBS, routed_experts=part) | top, model=MODEL)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">i4"])
def test_routes_of_all_layers_or_of_those_with_experts(dtype):
    for ids in (ROUTES, MOE):
        routes = routed(npy(ids.astype(dtype))).routes
        np.testing.assert_array_equal(routes, MOE)
        assert routes.dtype == np.uint8


def test_rows_that_come_apart_a_last_row_that_lacks_and_unknown_rows():
    apart = routed(npy(ROUTES[5:]), prompt_routed_experts=npy(ROUTES[:5])).routes
    np.testing.assert_array_equal(apart, MOE)
    for ids, unknown in (
        (ROUTES[:-1], [6]),
        (np.where(np.arange(7)[:, None, None] < 2, MISSING, ROUTES), [0, 1]),
    ):
        routes, missing = as_routes(routed(npy(ids.astype(np.int32))).routes, 8)
        assert np.flatnonzero(missing).tolist() == unknown
        known = ~missing
        np.testing.assert_array_equal(routes[known], MOE[known])


WRONG_ROUTES = {
    "none": (None, "no routed_experts came back; a preempted request has none"),
    "two rows too few": (npy(ROUTES[:-2]), "routed_experts has 5 rows, not 7"),
    "a row too many": (npy(np.concatenate([ROUTES, ROUTES[:1]])), "has 8 rows, not 7"),
    "another k": (npy(ROUTES[:, :, :1]), "not rows x 2 layers x 2"),
    "an expert that is not there": (
        npy(ROUTES + 1),
        "routed_experts has the expert 8; the model has experts 0 to 7",
    ),
    "below -1": (npy(ROUTES - 2), "routed_experts has the expert -2"),
    "floats": (npy(ROUTES.astype(float)), "has no integers"),
    "objects": (npy(ROUTES.astype(object)), "is not a .npy file in base64"),
    "no file": ("AAAA", "is not a .npy file in base64"),
    "no base64": ("?", "is not a .npy file in base64"),
}


@pytest.mark.parametrize("case", WRONG_ROUTES)
def test_wrong_routes_are_refused_by_name(case):
    routes, message = WRONG_ROUTES[case]
    with pytest.raises(ResponseError, match="^sample 7/2: ") as caught:
        routed(routes)
    assert message in str(caught.value)


def scores(rows: Any) -> np.ndarray:
    body = json.dumps({"prompt_logprobs": rows}).encode()
    return response_parser.parse_input_scores(body, asked(), [5, 6, 7]).log_probs


def test_scores_are_those_of_the_tokens_that_were_sent():
    entries = [
        None,
        {"6": {"logprob": -1.5}},
        {"9": {"logprob": -0.5, "rank": 1}, "7": {"logprob": -2.0, "rank": 5}},
    ]
    assert scores(entries).tolist() == [-1.5, -2.0]
    for wrong, message in (
        (entries[:2], "2 entries for 3 tokens"),
        ([*entries[:2], {"9": {"logprob": -0.5}}], "lacks the log-prob"),
        ([*entries[:2], {"7": {"logprob": -9999.0}}], "-9999"),
    ):
        with pytest.raises(ResponseError, match=message):
            scores(wrong)


def test_most_likely_ids_at_the_input():
    """The token that was sent is among them if its rank is."""
    rows = [
        None,
        {"6": {"logprob": -1.5, "rank": 2}, "3": {"logprob": -0.5, "rank": 1}},
        {
            "7": {"logprob": -4.0, "rank": 9},
            "9": {"logprob": -0.75, "rank": 2},
            "2": {"logprob": -0.25, "rank": 1},
        },
    ]

    def parse(rows: Any) -> InputScores:
        model = replace(asked().model, top_log_probs=2)
        body = json.dumps({"prompt_logprobs": rows}).encode()
        return response_parser.parse_input_scores(body, replace(asked(), model=model), [5, 6, 7])

    scores = parse(rows)
    assert scores.log_probs.tolist() == [-1.5, -4.0]
    assert scores.top_ids.tolist() == [[3, 6], [2, 9]]
    assert scores.top_log_probs.tolist() == [[-0.5, -1.5], [-0.25, -0.75]]
    fewer = {"7": {"logprob": -4.0, "rank": 9}, "2": {"logprob": -0.25, "rank": 1}}
    with pytest.raises(ResponseError, match="log-probs of 1 ids at 2 of 2 tokens came back"):
        parse([*rows[:2], fewer])


def ranked(*entries: tuple[int, float, int]) -> list[dict[str, Any]]:
    """`top_logprobs` of (id, log-prob, rank)."""
    return [{"token_id": token, "logprob": value, "rank": rank} for token, value, rank in entries]


# As vLLM 0.32 writes them for logprobs = 3: the sampled token, then the most likely by rank.
TOP = [
    ranked((7, -0.5, 1), (4, -1.0, 2), (5, -3.0, 3)),
    ranked((9, -1.25, 2), (2, -0.75, 1), (3, -2.5, 3)),
    ranked((1, -0.125, 40), (8, -0.0625, 1), (6, -4.0, 2)),
]
WITH_TOP = replace(PLAIN, top_log_probs=2)


def with_top(rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    reply = vllm_answer(TOKENS, LOG_PROBS)
    content = reply["choices"][0]["logprobs"]["content"]
    for entry, top in zip(content, rows, strict=True):
        entry["top_logprobs"] = top
    return reply


def test_the_most_likely_ids_do_not_depend_on_the_draw():
    part = parse(with_top(TOP), model=WITH_TOP)
    assert part.top_ids.tolist() == [[7, 4], [2, 9], [8, 6]] and part.top_ids.dtype == np.int32
    assert part.top_log_probs.tolist() == [[-0.5, -1.0], [-0.75, -1.25], [-0.0625, -4.0]]
    unasked = parse(with_top(TOP), model=WITH_TOP, log_probs=False)
    assert unasked.top_ids is None and unasked.log_probs is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TOP[2][:2], "log-probs of 1 ids at 3 of 3 tokens came back; 2 ids were asked for"),
        (ranked((8, -9999.0, 1), (6, -4.0, 2)), "the log-prob -9999 came back"),
        (ranked((8, -1.0, 1), (96, -4.0, 2)), "token id 96 came back"),
    ],
)
def test_other_ids_than_requested_are_refused(row, message):
    with pytest.raises(ResponseError, match="^sample 7/2: ") as caught:
        parse(with_top([*TOP[:2], row]), model=WITH_TOP)
    assert message in str(caught.value)


# For logprobs = 4 with a support of at most 3: -9999 stands for minus infinity.
DRAWABLE = [
    ranked((7, -0.5, 1), (4, -1.0, 2), (5, -3.0, 3), (0, -9999.0, 4)),
    ranked((9, -1.25, 2), (2, -0.75, 1), (0, -9999.0, 3), (1, -9999.0, 3)),
    ranked((1, 0.0, 1), (0, -9999.0, 2), (2, -9999.0, 2), (3, -9999.0, 2)),
]


def test_the_ids_that_could_be_drawn_have_finite_log_probs():
    part = parse(with_top(DRAWABLE), max_support=3)
    assert part.support_lengths.tolist() == [3, 2, 1] and part.support_lengths.dtype == np.int32
    assert part.support_ids.tolist() == [7, 4, 5, 9, 2, 1] and part.support_ids.dtype == np.int32
    assert part.log_probs.tolist() == LOG_PROBS and part.top_ids is None
    assert parse(with_top(DRAWABLE)).support_ids is None
    with pytest.raises(EngineError, match="rollout.max_support = 2: more ids could be drawn"):
        parse(with_top(DRAWABLE), max_support=2)
    with pytest.raises(ResponseError, match="a token is not among the ids that could be drawn"):
        parse(with_top([*DRAWABLE[:2], ranked((2, -0.5, 1))]), max_support=3)
