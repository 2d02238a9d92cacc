"""The benchmark of the data plane: its figures, by hand."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from benchmarks.data_plane import (
    EXPERTS,
    LAYERS,
    TOP,
    Figure,
    Response,
    measure_ranks,
    response_body,
)


def test_a_target_is_the_most_that_is_allowed() -> None:
    assert Figure("time", 0.25, 0.25, "s").met and not Figure("time", 0.26, 0.25, "s").met


def test_a_response_becomes_a_checked_sample_and_a_batch() -> None:
    response = Response(5)
    body = response_body(5)
    sample = response.sample(body)
    assert sample.tokens.tolist()[1:] == json.loads(body)["output_ids"]
    assert sample.routed_experts.shape == (5, LAYERS, TOP) and sample.routed_experts.max() < EXPERTS
    assert response.packed(sample).routed_experts.shape == (6, LAYERS, TOP)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, tensor", [(2, 1), (4, 2)])
def test_ranks_of_a_small_batch(ranks: int, tensor: int) -> None:
    """Tokens and routes of a share, by hand: 16 responses of 9 tokens to a prompt of one."""
    for measured in chain.from_iterable(
        measure_ranks(ranks, 16, 9, routes=True, turns=2, tensor=tensor)
    ):
        assert measured.tokens == 16 * 10 and measured.share >= 16 * (
            10 * 8 + 9 * (LAYERS * TOP + 1 + 4)
        )
        assert set(measured.seconds) == {
            "receive and check",
            "plan and move",
            "pack",
            "collect",
            "metrics",
            "advantages",
        }
