"""Waiting ends with a value, with the time, or with what is waited for."""

import pytest

from tests.support.waiting import wait_for


def test_the_first_true_value():
    values = iter([0, "", 3, 4])
    assert wait_for(lambda: next(values), pause=0.0) == 3


def test_too_late_and_too_early_an_end():
    with pytest.raises(AssertionError, match="nothing within 0.01 s: the log"):
        wait_for(lambda: False, 0.01, pause=0.0, said=lambda: "the log")
    with pytest.raises(AssertionError, match="has ended: the log"):
        wait_for(lambda: False, alive=lambda: False, said=lambda: "the log")
