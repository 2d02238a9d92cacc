"""Every reply that doesn't match its request is refused with one line that names it; the others
are exact.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.server_api import (
    InputScores,
    RequestContext,
    ResponseError,
)
from megatron_gspo.rollout.sglang import response_parser
from megatron_gspo.rollout.sglang.response_parser import decode_response, max_response_bytes
from tests.support.served_models import served_model
from tests.support.sglang_responses import MODEL, VERSION, answer, asked, encoded, route_ids

ROWS = "`$.meta_info.output_token_logprobs"
GOOD = answer([9, 8, 1], [-0.5, -1.25, 0.0])


def changed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> dict[str, Any]:
    """GOOD after `change(answer, meta_info)`."""
    reply = copy.deepcopy(GOOD)
    change(reply, reply["meta_info"])
    return reply


def parse_response(reply: Any, request: RequestContext) -> Any:
    return response_parser.parse_response(decode_response(body(reply), request), request)


def is_empty(reply: Any, request: RequestContext) -> bool:
    return response_parser.is_empty(decode_response(body(reply), request), request)


def response_version(reply: Any, request: RequestContext) -> str:
    return response_parser.response_version(decode_response(body(reply), request), request)


def parse_input_scores(reply: Any, request: RequestContext, tokens: Any) -> InputScores:
    return response_parser.parse_input_scores(body(reply), request, tokens)


def body(reply: Any) -> bytes:
    """As it travels: without spaces, and not ASCII alone, since a server writes UTF-8."""
    if isinstance(reply, bytes):
        return reply
    text = json.dumps(reply, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")


def refusal(reply: Any, parse: Callable[..., Any] = parse_response, **request: Any) -> str:
    with pytest.raises(ResponseError) as caught:
        parse(reply, asked(**request))
    message = str(caught.value)
    assert message.startswith("sample 7/2: ") and "\n" not in message and len(message) < 400
    return message


def set_row(position: int, row: Any) -> Callable[..., object]:
    def change(answer: dict[str, Any], meta: dict[str, Any]) -> None:
        meta["output_token_logprobs"][position] = row

    return change


def set_meta(**values: Any) -> Callable[..., object]:
    return lambda a, m: m.update(values)


def test_a_good_answer_is_taken_as_it_is():
    response = parse_response(GOOD, asked())
    assert response.tokens.dtype == np.int64 and response.tokens.tolist() == [9, 8, 1]
    assert response.log_probs.dtype == np.float32
    assert response.log_probs.tolist() == [
        -0.5,
        -1.25,
        0.0,
    ]
    assert (response.finish_reason, response.cached) == ("stop", 2)
    # An array of its own, not a view of the body.
    assert response.routes.dtype == np.uint8 and response.routes.base is None
    # 5 + 3 - 1 fed tokens, without the dense layer.
    np.testing.assert_array_equal(response.routes, route_ids(7)[:, [0, 2]])


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")])
def test_the_ids_are_compared_however_they_are_written(separators):
    def written(reply: dict[str, Any]) -> bytes:
        return json.dumps(reply, separators=separators).encode()

    assert parse_response(written(GOOD), asked()).tokens.tolist() == [9, 8, 1]
    for absent in (
        changed(lambda a, m: a.pop("output_ids")),
        changed(lambda a, m: a.update(output_ids=None)),
    ):
        assert parse_response(written(absent), asked()).tokens.tolist() == [9, 8, 1]
    for case in ("short ids", "other ids", "ids of floats", "ids no list"):
        assert WRONG[case][1] in refusal(written(changed(WRONG[case][0])))
    assert is_empty(
        written({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}), asked()
    )
    aborted = {"output_ids": [9, 8], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert not is_empty(written(aborted), asked())


def test_routes_from_a_position_on():
    reply = answer([9, 8, 1], [-1.0] * 3, start=4)
    response = parse_response(reply, asked(routes_start=4))
    np.testing.assert_array_equal(response.routes, route_ids(3)[:, [0, 2]])
    assert "holds 18 ids, not 7 rows x 3 layers x 2" in refusal(reply)
    without = asked(model=replace(MODEL, return_routes=False))
    assert parse_response(changed(lambda a, m: m.pop("routed_experts")), without).routes is None


@pytest.mark.parametrize(
    "before",
    [
        {"text": 'a reply with "routed_experts":"AAAA" in it'},
        {"more": {"routed_experts": "AAAA"}},
        {"more": {'"routed_experts': "AAAA"}},
        {"routed_experts": "AAAA"},
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_routes_are_those_of_meta_info(before, separators):
    written = json.dumps({**before, **GOOD}, separators=separators).encode()
    np.testing.assert_array_equal(parse_response(written, asked()).routes, route_ids(7)[:, [0, 2]])
    without = {**before, **changed(lambda a, m: m.update(routed_experts=""))}
    written = json.dumps(without, separators=separators).encode()
    assert "routed_experts holds 0 ids" in refusal(written)


WRONG = {
    "short log-probs": (
        lambda a, m: m["output_token_logprobs"].pop(),
        "output_ids and output_token_logprobs disagree",
    ),
    "short ids": (lambda a, m: a["output_ids"].pop(), "disagree"),
    "other ids": (lambda a, m: a.update(output_ids=[10, 8, 1]), "disagree"),
    "ids of floats": (
        lambda a, m: a.update(output_ids=[9.5, 8.0, 1.0]),
        "got `float` - at `$.output_ids[0]`",
    ),
    "ids no list": (
        lambda a, m: a.update(output_ids="981"),
        "Expected `array | null`, got `str` - at `$.output_ids`",
    ),
    "no log-probs": (set_meta(output_token_logprobs=None), "no output_token_logprobs came back"),
    "NaN": (set_row(1, [float("nan"), 8, None]), "the response is not JSON"),
    "beyond float32": (set_row(1, [-1e300, 8, None]), "the log-prob -inf came back"),
    "positive": (set_row(1, [0.5, 8, None]), "the log-prob 0.5 came back"),
    "a bool": (set_row(1, [False, 8, None]), f"Expected `float`, got `bool` - at {ROWS}[1][0]`"),
    "id a bool": (set_row(2, [-0.5, True, None]), f"Expected `int`, got `bool` - at {ROWS}[2][1]`"),
    "id negative": (set_row(2, [-0.5, -1, None]), "Expected `int` >= 0"),
    "id of no vocabulary": (
        set_row(2, [-0.5, 96, None]),
        "token id 96 came back; the vocabulary has 96",
    ),
    "unknown reason": (
        set_meta(finish_reason={"type": "tired"}),
        "expected one of ('stop', 'length', 'abort')",
    ),
    "reason endless": (set_meta(finish_reason={"type": "x" * 10**6}), "expected one of"),
    "no reason": (set_meta(finish_reason=None), "expected one of"),
    "stopped on no end token": (
        lambda a, m: (set_row(2, [-0.5, 5, None])(a, m), a.update(output_ids=[9, 8, 5])),
        "stopped on 5, which is not an end token ([1])",
    ),
    "cut off early": (
        set_meta(finish_reason={"type": "length"}),
        "cut off for its length after 3 of 4",
    ),
    "no routes": (
        set_meta(routed_experts=None),
        "no routed_experts came back; start the server with",
    ),
    "routes no base64": (set_meta(routed_experts="(=)" * 40), "not base64 of int32"),
    "routes with padding inside": (
        set_meta(routed_experts="AA==" + encoded(route_ids(7))[4:]),
        "not base64 of int32",
    ),
    "routes a list": (set_meta(routed_experts=[[0, 1]]), "no routed_experts came back"),
    "routes too few": (
        set_meta(routed_experts=encoded(route_ids(6))),
        "holds 36 ids, not 7 rows x 3 layers x 2",
    ),
    "expert too high": (
        set_meta(routed_experts=encoded(route_ids(7) + 1)),
        "has the expert 8; the model has experts 0 to 7",
    ),
    "expert negative": (
        set_meta(routed_experts=encoded(route_ids(7) - 1)),
        "has the expert -1; the model has experts 0 to 7",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_name(case):
    change, words = WRONG[case]
    assert words in refusal(changed(change))


def test_a_stop_without_a_token():
    assert "stopped on nothing" in refusal(answer([], []))


def test_any_end_is_right_where_no_end_token_is_known():
    assert parse_response(
        answer([5], [-1.0]), asked(model=replace(MODEL, stop_ids=()))
    ).tokens.tolist() == [5]


@pytest.mark.parametrize(
    "reply",
    [
        None,
        3,
        "text",
        [],
        [GOOD],
        {},
        {"meta_info": None},
        {"meta_info": [1]},
        {"error": {"message": "no"}},
    ],
)
def test_what_is_no_answer(reply):
    for parse in (parse_response, response_version, is_empty):
        assert "the response has another form: " in refusal(reply, parse)
    assert "the response has another form: " in refusal(
        reply, lambda a, q: parse_input_scores(a, q, [4])
    )


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"{",
        b"Internal Server Error",
        b'{"meta_info": {"weight_version": "\xff\xfe"}}',
        b'{"meta_info": {"id": ' + b"[" * 10**5 + b"]" * 10**5 + b"}}",
    ],
    ids=["nothing", "half", "text", "not UTF-8", "deep"],
)
def test_what_is_no_json(reply):
    for parse in (parse_response, response_version, is_empty):
        assert f"({len(reply)} bytes)" in refusal(reply, parse)


@pytest.mark.parametrize("cached", [None, "3", True, -1, 6, 10**400, 2.5])
def test_a_count_of_cached_tokens_that_means_nothing_counts_as_none(cached):
    assert parse_response(changed(set_meta(cached_tokens=cached)), asked()).cached == 0


def test_an_empty_answer_is_one_that_was_aborted_before_its_first_token():
    assert is_empty(answer([], [], "abort"), asked())
    assert is_empty(
        {"meta_info": {"finish_reason": {"type": "abort", "message": "Abort"}}}, asked()
    )
    assert not is_empty(answer([9], [-1.0], "abort"), asked())
    assert not is_empty(answer([], []), asked())


def test_the_version_is_one_and_named():
    assert response_version(GOOD, asked()) == VERSION
    assert "the response has no weight_version" in refusal(
        changed(set_meta(weight_version=None)), response_version
    )
    assert "the response has no weight_version" in refusal(
        changed(set_meta(weight_version=3)), response_version
    )
    spans = [{"version": "old", "start": 0, "end": 1}, {"version": VERSION, "start": 1, "end": 3}]
    words = refusal(changed(set_meta(weight_versions=spans)), response_version)
    assert "the weights changed from" in words and "old" in words
    spans[0]["end"] = 0  # before its first token
    assert response_version(changed(set_meta(weight_versions=spans)), asked()) == VERSION
    # 0.5.15 has none.
    assert response_version(changed(set_meta(weight_versions=None)), asked()) == VERSION
    for strange in (5, True, "spans", {"version": "old"}, [3, None, "x"]):
        message = refusal(changed(set_meta(weight_versions=strange)), response_version)
        assert "weight_versions" in message
    endless = [{"version": "old\n" * 10**5, "start": 0, "end": 1}]
    refusal(changed(set_meta(weight_versions=endless)), response_version)


def test_log_probs_of_the_input():
    rows = [[None, 4, None], [-0.5, 5, None], [-2.0, 6, None]]

    def parse(rows: Any, tokens: tuple[int, ...] = (4, 5, 6)) -> np.ndarray:
        reply = {"meta_info": {"input_token_logprobs": rows}}
        return parse_input_scores(reply, asked(), tokens).log_probs

    log_probs = parse(rows)
    assert log_probs.dtype == np.float32 and log_probs.tolist() == [-0.5, -2.0]
    # SGLang reports the last id of the vocabulary as 0.
    last = asked().model.vocab_size - 1
    for reported in (0, last):
        of_last = parse([rows[0], [-0.5, reported, None], rows[2]], (4, last, 6))
        assert of_last.tolist() == [-0.5, -2.0]
    for wrong, words in (
        (rows[:2], "has 2 entries for 3 tokens"),
        (None, "Expected `array`, got `null`"),
        ([rows[0], rows[0], rows[2]], "a log-prob of input_token_logprobs is missing"),
        ([rows[0], rows[1], [-2.0, 7, None]], "of other tokens than were sent"),
        ([rows[0], rows[1], [0.5, 6, None]], "the log-prob 0.5"),
    ):
        with pytest.raises(ResponseError, match=re.escape(words)):
            parse(wrong)


def test_most_likely_ids_at_the_input():
    rows = [[None, 4, None], [-0.5, 5, None], [-2.0, 6, None]]
    top = [None, [[-0.5, 5, None], [-1.0, 3, None]], [[-0.25, 7, None], [-1.75, 2, None]]]

    def parse(top: Any) -> InputScores:
        meta = {"input_token_logprobs": rows, "input_top_logprobs": top}
        model = replace(asked().model, top_log_probs=2)
        return parse_input_scores({"meta_info": meta}, replace(asked(), model=model), (4, 5, 6))

    scores = parse(top)
    assert scores.top_ids.tolist() == [[5, 3], [7, 2]]
    assert scores.top_log_probs.tolist() == [[-0.5, -1.0], [-0.25, -1.75]]
    for wrong, words in (
        (None, "log-probs of 2 ids at 0 of 2 tokens came back"),
        (top[:2], "at 1 of 2 tokens came back"),
        ([None, top[1][:1], top[2]], "log-probs of 1 ids at 2 of 2 tokens"),
        ([None, top[1], None], "log-probs of 0 ids"),
        ([None, top[1], [[-1.0, 10**6, None], [-2.0, 2, None]]], "token id 1000000 came back"),
    ):
        with pytest.raises(ResponseError, match=re.escape(words)):
            parse(wrong)


NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.just(10**400))
ANYTHING = st.recursive(
    NUMBERS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "version", "start", "end", "meta_info", "0"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = [
    "finish_reason",
    "output_token_logprobs",
    "routed_experts",
    "weight_version",
    "weight_versions",
    "cached_tokens",
    "input_token_logprobs",
]


def only_answer_errors(reply: Any) -> None:
    for parse in (
        parse_response,
        response_version,
        is_empty,
        lambda a, q: parse_input_scores(a, q, [4, 5, 6]),
    ):
        try:
            parse(reply, asked())
        except ResponseError as error:
            assert str(error).startswith("sample 7/2: ") and "\n" not in str(error)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING), st.none() | ANYTHING)
def test_no_change_of_a_good_answer_raises_anything_else(meta, ids):
    reply = copy.deepcopy(GOOD)
    reply["meta_info"] |= meta
    if ids is not None:
        reply["output_ids"] = ids
    only_answer_errors(reply)


@given(st.data())
def test_what_a_server_says_is_what_comes_out(data):
    count = data.draw(st.integers(1, 6))
    start = data.draw(st.integers(0, 3))
    context = data.draw(st.integers(4, 9))
    layers = data.draw(st.integers(1, 4))
    moe = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    k = data.draw(st.integers(1, 3))
    num_experts = data.draw(st.sampled_from([4, 300]))
    model = served_model(
        moe_layers=tuple(i in moe for i in range(layers)), k=k, num_experts=num_experts
    )
    tokens = data.draw(st.lists(st.integers(0, 95), min_size=count, max_size=count))
    log_probs = data.draw(st.lists(st.floats(-100, 0, width=32), min_size=count, max_size=count))
    reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
    if reason == "stop":
        tokens[-1] = 1
    num_routes = context + count - 1 - start
    seed = data.draw(st.integers(0, 99))
    ids = np.random.default_rng(seed).integers(
        num_experts, size=(num_routes, layers, k), dtype=np.int32
    )
    reply = answer(tokens, log_probs, reason, context, start, routed_experts=encoded(ids))
    request = asked(
        context_length=context,
        routes_start=start,
        model=model,
        max_new_tokens=count if reason == "length" else count + data.draw(st.integers(0, 2)),
    )
    response = parse_response(reply, request)
    assert response.tokens.tolist() == tokens and response.finish_reason == reason
    np.testing.assert_array_equal(response.log_probs, np.array(log_probs, dtype=np.float32))
    np.testing.assert_array_equal(response.routes, ids[:, list(moe)])
    assert response.routes.dtype == (np.uint8 if num_experts == 4 else np.uint16)
    assert len(json.dumps(reply)) <= max_response_bytes(request)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 11, 12, 13])
@pytest.mark.parametrize("layers, k", [(1, 1), (2, 1), (5, 1), (2, 2)])
def test_routes_that_are_decoded_in_pieces(monkeypatch, rows, layers, k):
    """Pieces of three or six rows; the last may be shorter and end in padding."""
    monkeypatch.setattr(response_parser, "_PIECE_IDS", 6 * layers * k)
    model = served_model(moe_layers=(True,) * layers, k=k, num_experts=90)
    ids = np.arange(rows * layers * k, dtype=np.int32).reshape(rows, layers, k)
    reply = answer([1], [-1.0], context=rows, routed_experts=encoded(ids))
    np.testing.assert_array_equal(
        parse_response(reply, asked(context_length=rows, model=model)).routes, ids
    )
    ids[-1, -1, -1] = 90
    reply["meta_info"]["routed_experts"] = encoded(ids)
    assert "has the expert 90; the model has experts 0 to 89" in refusal(
        reply, context_length=rows, model=model
    )


def test_the_bound_of_an_answer_grows_with_what_is_asked_for_and_no_further():
    small = asked()
    large = asked(max_new_tokens=32_000, context_length=8_000)
    assert max_response_bytes(small) < 10**5
    routes = 40_000 * 3 * 2 * 4 * 4 / 3  # base64 of int32
    words = 32_000 * 128 * 3  # a vocabulary's longest tokens are 128 characters, some of 3 bytes
    assert routes + words < max_response_bytes(large) < 3 * (routes + words)


# As SGLang 0.5.23 writes them for top_logprobs_num = 2: [log-prob, id, text] at each token.
TOP = [
    [[-0.5, 9, None], [-1.0, 4, None]],
    [[-0.75, 2, None], [-1.25, 8, None]],
    [[0.0, 1, None], [-30.5, 95, None]],
]
WITH_TOP = replace(MODEL, top_log_probs=2)


def test_the_most_likely_ids_of_each_token():
    reply = answer([9, 8, 1], [-0.5, -1.25, 0.0], output_top_logprobs=TOP)
    part = parse_response(reply, asked(model=WITH_TOP))
    assert part.top_ids.tolist() == [[9, 4], [2, 8], [1, 95]] and part.top_ids.dtype == np.int32
    assert part.top_log_probs.tolist() == [[-0.5, -1.0], [-0.75, -1.25], [0.0, -30.5]]
    assert part.top_log_probs.dtype == np.float32
    assert parse_response(reply, asked()).top_ids is None
    more = max_response_bytes(asked(model=WITH_TOP)) - max_response_bytes(asked())
    assert more == 4 * 2 * 512


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (None, "log-probs of 2 ids at 0 of 3 tokens came back; 2 ids were asked for"),
        (TOP[:2], "log-probs of 2 ids at 2 of 3 tokens came back"),
        ([*TOP[:2], TOP[2][:1]], "log-probs of 1 ids at 3 of 3 tokens came back"),
        ([*TOP[:2], None], "log-probs of 0 ids at 3 of 3 tokens came back"),
        ([*TOP[:2], [[0.5, 1, None], [-1.0, 2, None]]], "the log-prob 0.5 came back"),
        ([*TOP[:2], [[-0.5, 96, None], [-1.0, 2, None]]], "token id 96 came back"),
    ],
)
def test_other_ids_than_requested_are_refused(top, message):
    reply = answer([9, 8, 1], [-0.5, -1.25, 0.0], output_top_logprobs=top)
    assert message in refusal(reply, model=WITH_TOP)


def test_the_ids_that_could_be_drawn_and_log_probs_over_them():
    """As SGLang 0.5.23 writes them; `output_token_logprobs` are over the vocabulary."""
    over_support = dict(
        output_token_sampling_mask=[[9, 4], [2, 8, 5], [1]],
        output_token_sampling_logprobs=[-0.25, -1.0, 0.0],
    )
    reply = answer([9, 8, 1], [-0.5, -1.25, -2.0], **over_support)
    part = parse_response(reply, asked(max_support=3))
    assert part.support_lengths.tolist() == [2, 3, 1] and part.support_lengths.dtype == np.int32
    assert part.support_ids.tolist() == [9, 4, 2, 8, 5, 1] and part.support_ids.dtype == np.int32
    assert part.log_probs.tolist() == [-0.25, -1.0, 0.0]
    plain = parse_response(reply, asked())
    assert plain.support_ids is None and plain.log_probs.tolist() == [-0.5, -1.25, -2.0]
    with pytest.raises(EngineError, match="rollout.max_support = 2: more ids could be drawn"):
        parse_response(reply, asked(max_support=2))
    absent = answer([9, 8, 1], [-0.5, -1.25, -2.0])
    assert "ids that could be drawn came back at 0 of 3" in refusal(absent, max_support=3)
    reply = answer(
        [9, 8, 1], [-0.5, -1.25, -2.0], **over_support | {"output_token_sampling_logprobs": []}
    )
    assert "output_token_sampling_logprobs has 0 entries for 3" in refusal(reply, max_support=3)
