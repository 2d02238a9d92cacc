"""Rows of the public layouts as the verifiers need them."""

from __future__ import annotations

from datetime import datetime

import pytest

from megatron_gspo.tools.evaluate.layouts import LeftOut, layout_of, parse_date
from tests.tools.evaluate.public_files import (
    AIME,
    AIME_2025,
    CAPITALISED,
    CODEFORCES,
    LIVECODEBENCH,
)


@pytest.mark.parametrize(
    ("row", "name", "verifier"),
    [
        (AIME[0], "math", "math_verify"),
        (AIME_2025[0], "math", "math_verify"),
        (CAPITALISED[0], "math", "math_verify"),
        (LIVECODEBENCH[0], "livecodebench", "code"),
        (CODEFORCES[0], "codeforces", "code"),
        (CODEFORCES[0] | {"prompt": "ready-made"}, "codeforces", "code"),
        ({"prompt": "a", "answer": "b"}, "plain", None),
        # It has what the config names.
        ({"problem": "p", "prompt": "a", "answer": "b"}, "plain", None),
        ({"text": "a"}, "plain", None),
    ],
)
def test_the_fields_tell_the_layout(row, name, verifier):
    layout = layout_of(row, "prompt")
    assert (layout.name, layout.verifier) == (name, verifier)


@pytest.mark.parametrize(
    ("row", "reason"),
    zip(
        CODEFORCES[4:],
        ["needs a checker", "interactive", "reads a file", "no tests", "incomplete tests"],
        strict=True,
    ),
)
def test_what_outputs_cannot_decide_is_left_out(row, reason):
    with pytest.raises(LeftOut, match=reason):
        layout_of(CODEFORCES[0], "prompt").read(row, "python")


def test_dates():
    assert (
        parse_date("2024-08-03T07:30:00")
        == parse_date("2024-08-03T07:30:00Z")
        == datetime(2024, 8, 3, 7, 30)
    )
    assert parse_date(1704067200) == datetime(2024, 1, 1)
    assert parse_date(datetime(2024, 1, 2)) == datetime(2024, 1, 2) and parse_date(None) is None
    with pytest.raises(ValueError):
        parse_date("soon")
    assert layout_of(CODEFORCES[0], "prompt").date(CODEFORCES[0]) == datetime(2024, 1, 1)
