"""Floating-point operations counted by hand, with the sizes of tests.support.tiny_models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_gspo.models import ModelShape, family_of
from megatron_gspo.models.flops import attended_pairs, forward_flops
from tests.support.tiny_models import tiny_config

LENGTH = 100
SCORED = 30
PAIRS = 5050  # of 100 queries with the keys before them and their own
HIDDEN = 32
HEAD = HIDDEN * 96

# Attention of 4 heads and 2 groups of 16: queries, keys, values and the output.
ATTENTION = HIDDEN * 64 + 2 * HIDDEN * 32 + 64 * HIDDEN
DENSE = 3 * 48 * HIDDEN
EXPERT = 3 * 16 * HIDDEN
# Latent attention: keys and values from 16 numbers, of 4 heads of 12 + 8, values of 16.
LATENT_KEYS = HIDDEN * (16 + 8) + 16 * 4 * (12 + 16) + 4 * 16 * HIDDEN
LATENT = HIDDEN * 24 + 24 * 4 * 20 + LATENT_KEYS
# A gated delta net: 4 key heads of 6, 8 value heads of 8; q k v, two rates and a gate; the output.
NET = HIDDEN * (2 * 4 * 6 + 8 * 8 + 2 * 8 + 8 * 8) + 8 * 8 * HIDDEN
# Mamba-2: 8 heads of 6, their gates, B and C of 4 groups of 10, time steps; the output.
MAMBA = HIDDEN * (2 * 8 * 6 + 2 * 4 * 10 + 8) + 8 * 6 * HIDDEN
DEEPSEEK_MOE = 12 * HIDDEN + 4 * EXPERT + EXPERT
GATED = ATTENTION + HIDDEN * 64  # a gate of the output

WEIGHTS = {
    "dense": 4 * (ATTENTION + DENSE),
    "moe": 4 * (ATTENTION + 8 * HIDDEN + 2 * EXPERT),
    # heads of 8; a shared expert of 24 with a gate
    "shared": 4 * (ATTENTION // 2 + 4 * HIDDEN + 2 * EXPERT + 3 * 24 * HIDDEN + HIDDEN),
    "deepseek": 4 * LATENT + DENSE + 3 * DEEPSEEK_MOE,
    "moonlight": 4 * (HIDDEN * 4 * 20 + LATENT_KEYS) + DENSE + 3 * DEEPSEEK_MOE,
    "glm_lite": 4 * LATENT + DENSE + 3 * (DEEPSEEK_MOE + EXPERT),
    "deepseek_v32": 4 * LATENT + DENSE + 3 * DEEPSEEK_MOE,
    "glm_dsa": 4 * LATENT + DENSE + 3 * DEEPSEEK_MOE,
    "kimi": 4 * LATENT + DENSE + 3 * DEEPSEEK_MOE,  # of the text
    "glm": 4 * ATTENTION + DENSE + 3 * DEEPSEEK_MOE,
    "gpt_oss": 4 * (ATTENTION + 8 * HIDDEN + 2 * EXPERT),
    "minimax": 4 * (ATTENTION + 4 * HIDDEN + 2 * EXPERT),
    # up and down alone; a shared expert of 24
    "nemotron": 3 * MAMBA
    + 2 * ATTENTION
    + 2 * 48 * HIDDEN
    + 2 * (12 * HIDDEN + 2 * HIDDEN * (4 * 16 + 24)),
    "qwen35_text": 2 * NET + 2 * GATED + 4 * DENSE,
    # one of four layers has no experts
    "next": 2 * NET + 2 * GATED + DENSE + 3 * (4 * HIDDEN + 2 * EXPERT + 3 * 24 * HIDDEN + HIDDEN),
    "qwen35_moe_text": 2 * NET
    + 2 * GATED
    + 4 * (4 * HIDDEN + 2 * EXPERT + 3 * 24 * HIDDEN + HIDDEN),
}

# Scores and sums of all layers, products of a pair in each head.
MIXING = {
    "deepseek": 4 * 4 * (20 + 16) * PAIRS,
    "moonlight": 4 * 4 * (20 + 16) * PAIRS,
    "glm_lite": 4 * 4 * (20 + 16) * PAIRS,
    "kimi": 4 * 4 * (20 + 16) * PAIRS,
    # of 6 selected keys
    **dict.fromkeys(("deepseek_v32", "glm_dsa"), 4 * 4 * (20 + 16) * (1 + 2 + 3 + 4 + 5 + 95 * 6)),
    "shared": 4 * 4 * 2 * 8 * PAIRS,
    # every other layer has a window of 5 keys
    "gpt_oss": 2 * 4 * 2 * 16 * (PAIRS + 1 + 2 + 3 + 4 + 96 * 5),
    **dict.fromkeys(("nemotron", "next", "qwen35_text", "qwen35_moe_text"), 2 * 4 * 2 * 16 * PAIRS),
}
# Two chunks of 64 tokens in two layers: keys and queries with keys; half of the product that solves
# the system; the values within; three products with the state, of which the last chunk has two.
RULE = 2 * (
    2 * (2 * 4 * 64 * 64 * 6 + 8 * 64 * 64 * (6 + 8) // 2 + 8 * 64 * 64 * 8)
    + (3 + 2) * 8 * 64 * 6 * 8
)
# Two chunks of 64 tokens in three layers: B with C; the values within; what goes into a state and
# what is read from it.
SCAN = 3 * 2 * (4 * 64 * 64 * 10 + 8 * 64 * 64 * 6 + 2 * 8 * 64 * 10 * 6)
# Indexers of 8 heads of 12: queries from 24 numbers, keys and weights; the scores of the queries
# that have more than 6 keys.
INDEXERS = 4 * (LENGTH * (8 * 12 * 24 + HIDDEN * (12 + 8)) + 8 * (12 + 1) * (PAIRS - 21))


def shape_of(family: str, **overrides: Any) -> ModelShape:
    return family_of(tiny_config(family, **overrides).to_dict())[1]


@pytest.mark.parametrize("family", WEIGHTS)
def test_a_forward_pass_by_hand(family: str) -> None:
    forward = forward_flops(shape_of(family), np.array([LENGTH]), np.array([SCORED]))
    mixing = MIXING.get(family, 4 * 4 * 2 * 16 * PAIRS)
    rules = dict.fromkeys(("next", "qwen35_text", "qwen35_moe_text"), RULE) | {"nemotron": SCAN}
    rule = rules.get(family, 0)
    assert forward.layers[0] == 2 * LENGTH * WEIGHTS[family]
    assert forward.scores[0] + forward.sums[0] == 2 * mixing
    assert forward.recurrence[0] == 2 * rule
    indexers = INDEXERS if family in ("deepseek_v32", "glm_dsa") else 0
    assert forward.indexer[0] == 2 * indexers
    assert forward.head[0] == 2 * SCORED * HEAD
    tokens = LENGTH * WEIGHTS[family] + SCORED * HEAD
    assert forward.total[0] == 2 * (tokens + mixing + rule + indexers)


def test_a_training_step_by_hand() -> None:
    """Three times the forward pass; twice the products of weights that are frozen."""
    forward = forward_flops(shape_of("moe"), np.array([LENGTH]), np.array([SCORED]))
    assert forward.training()[0] == 3 * forward.total[0]
    attention = 2 * 4 * 4 * 2 * 16 * PAIRS
    assert forward.training(frozen=True)[0] == 2 * forward.total[0] + attention


def test_what_is_computed_again() -> None:
    forward = forward_flops(shape_of("moe"), np.array([LENGTH]), np.array([SCORED]))
    head = 2 * SCORED * HEAD
    attention = 2 * 4 * 4 * 2 * 16 * PAIRS
    assert forward.recomputed("none")[0] == head + attention / 2
    assert forward.recomputed("selective")[0] == head + attention * 3 / 2
    assert forward.recomputed("full")[0] == forward.total[0] + attention / 2


def test_an_indexer_has_no_backward_pass_and_no_work_on_short_sequences() -> None:
    shape = shape_of("deepseek_v32")
    forward = forward_flops(shape, np.array([LENGTH]), np.array([SCORED]))
    assert forward.training()[0] == 3 * (forward.total[0] - 2 * INDEXERS) + 2 * INDEXERS
    assert forward_flops(shape, np.array([6]), np.array([3])).indexer[0] == 0


def test_sequences_add_up_and_a_value_has_no_vocabulary() -> None:
    shape = shape_of("qwen35_text")
    together = forward_flops(shape, np.array([LENGTH, 64, 65]), np.array([SCORED, 1, 2]))
    alone = [
        forward_flops(shape, np.array([length]), np.array([scored])).total[0]
        for length, scored in ((LENGTH, SCORED), (64, 1), (65, 2))
    ]
    assert together.total.tolist() == alone


@pytest.mark.parametrize(("length", "window"), [(7, None), (7, 3), (2, 3), (3, 3), (1, 1)])
def test_attended_pairs(length: int, window: int | None) -> None:
    keys = [min(i + 1, window or length) for i in range(length)]
    assert attended_pairs(np.array([length]), window)[0] == sum(keys)
