"""No layout is left out, none is impossible, and recomputation is spread over all of them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.equivalence.layouts import (
    DENSE,
    FAMILIES,
    LANGUAGE_MODELS,
    LORA,
    MEASURED,
    MOE,
    RECOMPUTE,
    SCENARIO_NAMES,
    Arrangement,
    layouts,
    turn_of,
)


def test_counts_by_hand():
    # A stage of TP * CP * DP = 1, 2, 4, 8 ranks can be chosen in 1, 3, 3, 1 ways and takes experts
    # in 1, 3, 4, 4 ways: 1 + 9 + 12 + 4 without a pipeline, and twice (plain, interleaved) the
    # first three with one.
    assert len(MOE) == 26 + 2 * 22
    assert Counter(a.world_size for a in MOE) == {1: 1, 2: 9 + 2, 4: 12 + 2 * 9, 8: 4 + 2 * 12}
    # TP 1: 4 ways of CP and DP; TP 2: twice, with and without sequence parallelism. With a pipeline
    # all but TP=CP=DP=2.
    assert len(DENSE) == 12 + 2 * 10
    assert len({a.name for a in MOE + DENSE}) == len(MOE) + len(DENSE)


def test_nothing_is_impossible_and_nothing_possible_is_missing():
    for a in MOE + DENSE:
        assert a.is_valid and a.world_size <= 8
        if a.moe:
            assert a.world_size % (a.expert * a.expert_tensor * a.pipeline) == 0
            assert a.sequence_parallel == (a.tensor == 2)
    assert (
        Arrangement(
            tensor=2, sequence_parallel=True, pipeline=2, context=2, expert=2, expert_tensor=2
        )
        in MOE
    )
    assert Arrangement(data=2, expert=2, expert_tensor=2) not in MOE, "four expert ranks on two"
    assert Arrangement(tensor=2) not in MOE and Arrangement(tensor=2, moe=False) in DENSE
    assert layouts(1) == [Arrangement()]


@pytest.mark.parametrize("name", MEASURED)
def test_every_model_meets_every_choice(name):
    turns = [turn_of(a, MEASURED[name]) for a in MEASURED[name]]
    assert {turn.recompute for turn in turns} == set(RECOMPUTE)
    assert {on for turn in turns for on in turn.distributed_optimizers} == {False, True}
    assert name in LORA or {turn.one_by_one for turn in turns} == set(SCENARIO_NAMES)


@pytest.mark.parametrize("name", [*FAMILIES, *LANGUAGE_MODELS, "lora_each", "lora_shared"])
def test_other_models_meet_every_size_in_at_least_twenty_layouts(name):
    chosen = MEASURED[name]
    assert len(set(chosen)) == len(chosen) >= (12 if name == "lora_shared" else 20)
    assert max(a.world_size for a in chosen) == max(
        a.world_size for a in (MOE if chosen[0].moe else DENSE)
    )
    for size in ("tensor", "pipeline", "interleaved", "context", "data", "expert", "expert_tensor"):
        assert len({getattr(a, size) for a in chosen}) == (
            2 if chosen[0].moe or "expert" not in size else 1
        ), size
