"""The checks that all servers' responses share. In whole responses: test_response_parser.py of each engine."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.rollout.server_engine import response_checks
from megatron_gspo.rollout.server_engine.server_api import ResponseError
from tests.support.sglang_responses import asked


def test_one_version_of_all_spans_that_have_tokens():
    spans = [{"version": "a", "start": 0, "end": 0}, {"version": "b", "start": 0, "end": 3}]
    assert response_checks.one_version("b", spans, asked()) == "b"
    assert response_checks.one_version("b", None, asked()) == "b"
    for version, given in (("a", spans), (None, spans), ("b", "text"), ("b", [1])):
        with pytest.raises(ResponseError, match="^sample 7/2: "):
            response_checks.one_version(version, given, asked())


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.25, -1e300])
def test_a_log_prob_is_finite_and_at_most_0(value):
    assert response_checks.checked_log_probs([-1.5, 0.0], asked()).tolist() == [-1.5, 0.0]
    with pytest.raises(ResponseError, match="must be finite and at most 0"):
        response_checks.checked_log_probs([-1.5, value], asked())


def test_the_end_agrees_with_the_reason():
    for tokens, reason in (([7, 1], "stop"), ([7, 8, 9, 5], "length"), ([7], "abort"), ([], "abort")):
        response_checks.check_end(np.array(tokens, dtype=np.int64), reason, asked())
    for tokens, reason in (([7], "stop"), ([], "stop"), ([7], "length"), ([7] * 5, "abort")):
        with pytest.raises(ResponseError):
            response_checks.check_end(np.array(tokens, dtype=np.int64), reason, asked())


def test_a_number_of_cached_tokens_is_a_statistic():
    assert [response_checks.cached_tokens(value, asked()) for value in (3, 6, -1, None, True)] == [3, 0, 0, 0, 0]
