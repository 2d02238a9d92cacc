"""A response that several requests drew has their tokens, log-probs, routes and versions, in
order.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.data.sample import Prompt
from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
from megatron_gspo.rollout.server_engine.server_api import ResponsePart
from tests.support.served_models import served_model

MODEL = served_model(moe_layers=(True, True), k=2, num_experts=8)


def part(tokens: list[int], rows: int, reason: str = "abort", first: int = 0) -> ResponsePart:
    """Route row i of a part is full of `first + i`."""
    routes = np.broadcast_to(
        np.arange(first, first + rows, dtype=np.int32)[:, None, None], (rows, 2, 2)
    )
    log_probs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8 - first
    return ResponsePart(np.array(tokens, dtype=np.int64), log_probs, reason, routes, 0)


def partial(limit: int = 6) -> PartialResponse:
    return PartialResponse(Prompt(7, np.array([11, 12, 13]), "abc"), 2, limit)


def test_parts_are_joined():
    made = partial()
    made.add(part([4, 5], rows=4), 3)  # 3 prompt tokens and 1 of the response were fed
    assert made.tokens == [11, 12, 13, 4, 5] and made.num_tokens == 2 and not made.finished
    assert made.routes_start == 4  # position 4, token 5, wasn't fed
    made.add(part([6], rows=1, first=4), 4)
    assert made.routes_start == 5 and made.oldest_version == 3
    made.add(part([7, 1], rows=2, first=5, reason="stop"), 6)
    assert made.finished
    sample = made.to_sample(MODEL, lambda ids: " ".join(map(str, ids)))
    sample.check()
    assert (sample.prompt_index, sample.sample_index, sample.prompt_length) == (7, 2, 3)
    assert sample.tokens.tolist() == [11, 12, 13, 4, 5, 6, 7, 1] and sample.tokens.dtype == np.int64
    assert sample.rollout_log_probs.tolist() == [-0.125, -0.25, -4.125, -5.125, -5.25]
    assert sample.rollout_log_probs.dtype == np.float32
    assert sample.token_versions.tolist() == [3, 3, 4, 6, 6]
    assert sample.token_versions.dtype == np.int32
    assert (sample.weight_version, sample.finish_reason, sample.text) == (3, "stop", "4 5 6 7 1")
    assert sample.loss_mask.tolist() == [True] * 5
    assert sample.routed_experts.shape == (7, 2, 2)
    # Each position once, by its first feeding.
    assert sample.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_response_interrupted_at_its_last_token_was_cut_off_for_its_length():
    made = partial(limit=2)
    made.add(part([4], rows=3), 1)
    assert not made.finished
    made.add(part([5], rows=1, first=3), 1)
    assert made.finished
    assert made.to_sample(MODEL, str).finish_reason == "length"


@pytest.mark.parametrize("cuts", [(1, 2, 3), (3, 3), (5, 1), (1,) * 6])
def test_every_cut_of_a_response_gives_the_same_sample(cuts):
    whole = partial(limit=6)
    whole.add(
        ResponsePart(
            np.arange(20, 26),
            np.linspace(-2, -1, 6, dtype=np.float32),
            "length",
            np.arange(8 * 4, dtype=np.int32).reshape(8, 2, 2) % 8,
            0,
        ),
        0,
    )
    expected = whole.to_sample(MODEL, str)
    made = partial(limit=6)
    begin = 0
    for size in cuts:
        end = begin + size
        fed_positions = slice(made.routes_start, 3 + end - 1)  # as requested and returned
        made.add(
            ResponsePart(
                whole.parts[0].tokens[begin:end],
                whole.parts[0].log_probs[begin:end],
                "length" if end == 6 else "abort",
                whole.parts[0].routes[fed_positions],
                0,
            ),
            0,
        )
        begin = end
    sample = made.to_sample(MODEL, str)
    for field in ("tokens", "rollout_log_probs", "routed_experts", "token_versions", "loss_mask"):
        np.testing.assert_array_equal(
            getattr(sample, field), getattr(expected, field), err_msg=field
        )
    assert sample.finish_reason == expected.finish_reason == "length"
