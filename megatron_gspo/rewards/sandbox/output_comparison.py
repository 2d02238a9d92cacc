"""Compares a program's output with the expected one. Runs outside the sandbox, on output that nobody trusts."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

# ASCII digits and blanks alone: float() and str.split() also take those of other scripts.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_BLANKS = " \t\r\f\v"
_MAX_DIGITS = 4000  # of a number; longer ones are compared as text


def same_text(output: bytes, expected: str, tolerance: float) -> bool:
    """Whether two outputs have the same lines of tokens, with blank lines at the end and the start left out.

    Tokens are equal as text, or as numbers: exactly if the expected one is an integer, otherwise within `tolerance`,
    absolute or relative. Bytes that are not UTF-8 equal nothing.
    """
    try:
        lines = _lines(output.decode())
    except UnicodeDecodeError:
        return False
    wanted = _lines(expected)
    return len(lines) == len(wanted) and all(
        _same_line(line, other, tolerance) for line, other in zip(lines, wanted, strict=True)
    )


def same_value(output: bytes, accepted: tuple[Any, ...], tolerance: float) -> bool:
    """Whether the output is the JSON of an accepted value; expected floats within `tolerance`, all else equal."""
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, a number of too many digits, or nested too deeply
        return False
    return any(_equal(value, other, tolerance) for other in accepted)


def _lines(text: str) -> list[str]:
    lines = [line.strip(_BLANKS) for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    start = next((number for number, line in enumerate(lines) if line), 0)
    return lines[start:]


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    if line == expected:
        return True
    tokens, wanted = _tokens(line), _tokens(expected)
    return len(tokens) == len(wanted) and all(
        token == other or _same_number(token, other, tolerance) for token, other in zip(tokens, wanted, strict=True)
    )


def _tokens(line: str) -> list[str]:
    return [token for token in re.split(f"[{_BLANKS}]+", line) if token]


def _same_number(token: str, expected: str, tolerance: float) -> bool:
    if max(len(token), len(expected)) > _MAX_DIGITS or not (_NUMBER.fullmatch(token) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(expected):
        try:
            return Decimal(token) == Decimal(expected)
        except InvalidOperation:
            return False
    return _close(float(token), float(expected), tolerance)


def _equal(value: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(
            _equal(a, b, tolerance) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[k], expected[k], tolerance) for k in expected)
    if isinstance(expected, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _close(value, expected, tolerance)
    return value == expected


def _close(value: float, expected: float, tolerance: float) -> bool:
    try:
        return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond the floats
        return False
