"""Fields of rows as data sets of the field have them: messages, tools, answers."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal

import numpy as np
import pytest

from megatron_gspo.data.prompt_files import PromptError
from megatron_gspo.data.prompt_rows import (
    answer_of,
    field_of,
    has_field,
    messages_of,
    tools_of,
)

VERL = {
    "prompt": "q",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


@pytest.mark.parametrize(
    ("row", "key", "value"),
    [
        (VERL, "reward_model.ground_truth", "4"),
        ({"reward_model": json.dumps(VERL["reward_model"])}, "reward_model.ground_truth", "4"),
        ({"a.b": 1, "a": {"b": 2}}, "a.b", 1),
        ({"a.b": {"c": 1}, "a": {"b": {"c": 2}}}, "a.b.c", 1),
        ({"a.b": {"x": 1}, "a": {"b": {"c": 2}}}, "a.b.c", 2),
        ({"answers": {"text": ["x", "y"]}}, "answers.text.1", "y"),
        ({"answers": [{"text": "x"}]}, "answers.0.text", "x"),
        ({"a": {"": 1}, "a.": 2}, "a.", 2),
    ],
)
def test_keys_with_dots(row, key, value):
    assert field_of("f line 1", row, key, "answer_key") == value and has_field(row, key)


@pytest.mark.parametrize(
    "key", ["reward_model.x", "prompt.x", "extra_info.index.x", "a.b", "", ".", "reward_model."]
)
def test_keys_that_lead_nowhere(key):
    assert not has_field(VERL, key)


@pytest.mark.parametrize(
    ("row", "setting", "key", "guess"),
    [
        (VERL, "answer_key", "answer", "to the right one, perhaps reward_model.ground_truth"),
        (
            {"problem": "p", "solution": "s"},
            "prompt_key",
            "prompt",
            "to the right one, perhaps problem",
        ),
        (
            {"problem": "p", "solution": "s"},
            "answer_key",
            "answer",
            "to the right one, perhaps solution",
        ),
        (
            {"question": "p", "answer": "s"},
            "prompt_key",
            "prompt",
            "(found: answer, question); set prompt_key to the right one, perhaps question",
        ),
        ({"messages": []}, "prompt_key", "prompt", "perhaps messages"),
        ({"x": 1}, "prompt_key", "prompt", "set prompt_key to the right one"),
        ({}, "prompt_key", "prompt", "(found: nothing); set prompt_key to the right one"),
    ],
)
def test_a_missing_key_names_the_one_that_is_meant(row, setting, key, guess):
    with pytest.raises(PromptError) as error:
        field_of("f line 1", row, key, setting)
    assert str(error.value).startswith(f"f line 1: key '{key}' is missing")
    assert str(error.value).endswith(guess)


USER = {"role": "user", "content": "hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
}


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ([USER], [USER]),
        ((USER,), [USER]),
        (USER, [USER]),
        (json.dumps([USER]), [USER]),
        (" " + json.dumps(USER), [USER]),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}],
                }
            ],
            [{"role": "user", "content": "a b"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}, "b"]}],
            [{"role": "user", "content": "ab"}],
        ),
        (
            [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "x"},
            ],
            [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "x"}],
        ),
        ([USER | {"tool_calls": None, "name": None}], [USER]),
        (
            [USER, CALL, {"role": "tool", "content": "2", "tool_call_id": "1"}],
            [USER, CALL, {"role": "tool", "content": "2", "tool_call_id": "1"}],
        ),
        ([USER, {"role": "assistant", "tool_calls": CALL["tool_calls"]}], [USER, CALL]),
        ("hi", None),
        ("[1, 2] is a list", None),
        ('["a", "b"]', None),
        ('{"role": "user"}', None),
    ],
)
def test_messages_in_every_form(value, messages):
    assert messages_of("f line 1", "prompt", value) == messages


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "a part of type 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "a part of type 'text'; only text is trained",
        ),
        ([{"role": "user", "content": [3]}], "a part of type 'int'"),
        (
            [USER, {"role": "user", "content": None}],
            "message 2 (of role 'user') has no content; give it text",
        ),
        (
            [{"role": "user", "content": {"a": 1}}],
            "message 1 (of role 'user') has a dict as content",
        ),
        ([{"content": "x"}], "is a list; it must be text or a list of chat messages"),
        ([USER, "x"], "is a list; it must be text"),
        ({"x": 1}, "is a dict; it must be text"),
        (3, "is a int; it must be text"),
    ],
)
def test_what_is_no_message(value, message):
    with pytest.raises(PromptError) as error:
        messages_of("f line 1", "prompt", value)
    assert str(error.value).startswith("f line 1: ") and message in str(error.value)


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"type": "int"}}}},
}


@pytest.mark.parametrize(
    "value",
    [
        [TOOL],
        TOOL,
        json.dumps([TOOL]),
        json.dumps(TOOL),
        [json.dumps(TOOL)],
        [TOOL | {"strict": None}],
    ],
)
def test_tools_in_every_form(value):
    assert tools_of(value) == [TOOL]


def test_keys_that_parquet_adds_to_tools_are_left_out():
    pyarrow = pytest.importorskip("pyarrow")
    other = {
        "type": "function",
        "function": {"name": "g", "parameters": {"properties": {"y": {"type": "int"}}}},
    }
    stored = pyarrow.Table.from_pylist([{"tools": [TOOL, other]}]).to_pylist()[0]["tools"]
    assert stored != [TOOL, other] and tools_of(stored) == [TOOL, other]


@pytest.mark.parametrize("value", ["calculator", ["calculator"], 3, [1], "[oops", {"a"}])
def test_what_is_no_tool(value):
    assert tools_of(value) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        ("", ""),
        ("NaN", "NaN"),
        (True, "true"),
        (4, "4"),
        (4.0, "4.0"),
        (-0.5, "-0.5"),
        (10**30, "1" + "0" * 30),
        (1e300, "1e+300"),
        (Decimal("3.50"), "3.50"),
        (Decimal("1E+3"), "1000"),
        (Decimal("-0.001"), "-0.001"),
        (Decimal("1E+999"), "1E+999"),
        (datetime.date(2026, 1, 31), "2026-01-31"),
        (datetime.datetime(2026, 1, 31, 12), "2026-01-31T12:00:00"),
        (datetime.time(12, 30), "12:30:00"),
        (b"72", "72"),
        ("é".encode(), "é"),
        (np.int64(7), "7"),
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "true"),
        (np.str_("x"), "x"),
        (np.array(3), "3"),
        (None, None),
        (float("nan"), None),
        (np.float64("nan"), None),
        (Decimal("NaN"), None),
        (Decimal("sNaN"), None),
        (np.datetime64("2026-01-31"), "2026-01-31"),
    ],
)
def test_answers_as_files_have_them(value, text):
    assert answer_of("f line 1", "answer", value) == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("inf"), "is inf, no number; correct it, or write it as text"),
        (Decimal("-Infinity"), "is -Infinity, no number"),
        (b"\xff", "holds bytes that are no UTF-8 text"),
        ([1], "is a list; it must be text or a number"),
        ({"a": 1}, "is a dict; it must be text or a number"),
    ],
)
def test_what_is_no_answer(value, message):
    with pytest.raises(PromptError) as error:
        answer_of("f line 1", "answer", value)
    assert str(error.value).startswith("f line 1: key 'answer' ") and message in str(error.value)
