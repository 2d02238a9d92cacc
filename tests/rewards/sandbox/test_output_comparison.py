"""Comparisons by hand."""

import json

import pytest

from megatron_gspo.rewards.sandbox.output_comparison import same_text, same_value


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("5", "5", True),
        ("5\n", "5", True),
        ("5", "5\r\n", True),
        ("\n\n5  \n\n", "5", True),
        ("6", "5", False),
        ("", "", True),
        ("", "5", False),
        ("5", "", False),
        ("1 2", "1  2", True),
        ("12", "1 2", False),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("2 1", "1 2", False),
        ("YES", "yes", False),
        ("5.0", "5", True),
        ("05", "5", True),
        ("5.0000001", "5", False),
        ("1000000", "1000001", False),
        ("0.3333333", "0.333333333", True),
        ("0.3334", "0.333333333", False),
        ("1e-9", "0.0", True),
        ("100000.05", "100000.0", True),
        ("100001.0", "100000.0", False),
        ("3", "3.0", True),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("inf", "1e999", False),
        ("1e999", "2e999", True),
        ("１", "1", False),
        ("1_0", "10", False),
        ("0x5", "5", False),
        ("5", "5.", True),
        (".5", "0.5", True),
        ("--5", "5", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "8" * 5000, False),
        ("5\u00a0", "5", False),
        ("9007199254740993", "9007199254740992", False),
        ("5\x0b5", "5 5", True),
        ("a\u2028b", "a b", False),
        ("\ufeff5", "5", False),
        ("5\0", "5", False),
        ("debug\n5", "5", False),
        ("1e999999999999999999999", "1", False),
    ],
)
def test_text(output, expected, same):
    assert same_text(output.encode(), expected, 1e-6) is same


def test_text_without_tolerance():
    assert not same_text(b"0.33333", "0.333333", 0.0)
    assert same_text(b"0.50", "0.5", 0.0)


def test_text_that_is_not_utf8():
    assert not same_text(b"5\xff", "5\ufffd", 1e-6)
    assert not same_text("5".encode("utf-16"), "5", 1e-6)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (5, 5, True),
        (5.0, 5, True),
        (6, 5, False),
        ("5", 5, False),
        (5, "5", False),
        ([5], 5, False),
        ([1, 2], [1, 2], True),
        ([2, 1], [1, 2], False),
        ([1], [1, 2], False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (None, None, True),
        (None, 0, False),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([[0.5], "x"], [[0.5], "x"], True),
        (10**400, 1.0, False),
        (True, 1, True),
        (False, 1, False),
    ],
)
def test_values(value, expected, same):
    assert same_value(json.dumps(value).encode(), (expected,), 1e-6) is same


def test_one_of_several_values():
    assert same_value(b"3", ([3], 3), 1e-6) and same_value(b"[3]", ([3], 3), 1e-6)
    assert not same_value(b"4", ([3], 3), 1e-6)


@pytest.mark.parametrize("output", [b"", b"5 5", b"[" * 10**6, b"9" * 10**5, b"\xff", b"five"])
def test_output_that_is_no_value(output):
    assert not same_value(output, (5,), 1e-6)
