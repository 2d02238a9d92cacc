"""JSON with binary data in base64, in pieces."""

from __future__ import annotations

import base64
import json
import random

import pytest

from megatron_gspo.weight_transport.base64_json import base64_pieces, json_with_base64


@pytest.mark.parametrize(
    "sizes", [[0], [1], [2, 2], [3, 1, 1], [1, 1, 1, 1, 5], [10**6, 1, 2**20 + 1]]
)
def test_base64_of_pieces_is_that_of_the_whole(sizes: list[int]) -> None:
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    assert b"".join(base64_pieces(pieces)) == base64.b64encode(b"".join(pieces))


def test_json_in_pieces() -> None:
    body = b"".join(json_with_base64({"flush": False}, "data", [[b"ab", b"c"], [b"d"]]))
    assert json.loads(body) == {"flush": False, "data": ["YWJj", "ZA=="]}
    assert json.loads(b"".join(json_with_base64({}, "data", []))) == {"data": []}
