"""Compares a program's output with the expected one.

Runs outside the sandbox and its limits, on output that nobody trusts: no object is made for a part
of the output where the expected one has no such part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

# ASCII digits alone: float() also takes those of other scripts.
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_MAX_DIGITS = 4000  # of a number; longer ones are compared as text
_STRUCTURE = (b"[", b"{", b",")


def same_text(output: bytes, expected: str, tolerance: float) -> bool:
    """Whether two outputs have the same lines of tokens, with blank lines at the end and the start
    left out.

    Tokens are equal as text, or as numbers: exactly if the expected one is an integer, otherwise
    within `tolerance`, absolute or relative. Blanks are those of ASCII.
    """
    printed = output.strip()
    wanted = expected.encode(errors="surrogatepass").strip()
    if printed == wanted:
        return True
    if printed.count(b"\n") != wanted.count(b"\n"):
        return False
    return all(
        _same_line(line, wanted_line, tolerance)
        for line, wanted_line in zip(_lines(printed), _lines(wanted), strict=True)
    )


def same_value(output: bytes, accepted: tuple[object, ...], tolerance: float) -> bool:
    """Whether the output is the JSON of an accepted value; expected floats within `tolerance`,
    all else equal.
    """
    if not any(_same_structure(output, expected) for expected in accepted):
        return False
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        # No JSON, no UTF-8, a number of too many digits, or nested too deeply.
        return False
    return any(_equal(value, expected, tolerance) for expected in accepted)


def _same_structure(output: bytes, expected: object) -> bool:
    """Whether texts of equal values could be these: lists and items are counted before they are
    read into memory.
    """
    wanted = json.dumps(expected, default=str).encode()
    return all(output.count(mark) == wanted.count(mark) for mark in _STRUCTURE)


def _lines(text: bytes) -> Iterator[bytes]:
    """One at a time: a list of short lines takes many times the memory of the text."""
    start = 0
    while (end := text.find(b"\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _same_line(line: bytes, expected: bytes, tolerance: float) -> bool:
    if line == expected:
        return True
    wanted = expected.split()
    tokens = line.split(None, len(wanted))  # one more than wanted at most
    return len(tokens) == len(wanted) and all(
        token == wanted_token or _same_number(token, wanted_token, tolerance)
        for token, wanted_token in zip(tokens, wanted, strict=True)
    )


def _same_number(token: bytes, expected: bytes, tolerance: float) -> bool:
    if max(len(token), len(expected)) > _MAX_DIGITS:
        return False
    if not (_NUMBER.fullmatch(token) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(expected):
        try:
            return Decimal(token.decode()) == Decimal(expected.decode())
        except InvalidOperation:
            return False
    return _close(float(token), float(expected), tolerance)


def _equal(value: object, expected: object, tolerance: float) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(
            _equal(a, b, tolerance) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _equal(value[k], expected[k], tolerance) for k in expected
        )
    if isinstance(value, bool):
        return value == expected
    if isinstance(value, (int, float)) and isinstance(expected, float):
        return _close(value, expected, tolerance)
    return value == expected


def _close(value: float, expected: float, tolerance: float) -> bool:
    if value == expected:
        return True
    try:
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond the floats
        return False
