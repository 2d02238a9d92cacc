"""Prompts of several sources: which is drawn when, and that a cursor is all that a resumed run needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gspo.data.prompt_mix import (
    MixedPrompts,
    MixedPromptSource,
    draws_before,
    of_each_source,
)
from megatron_gspo.data.prompts import PromptError
from tests.support.samples import make_prompt


def mixed(**sizes: int) -> MixedPrompts:
    return MixedPrompts(
        {name: [make_prompt(i) for i in range(size)] for name, size in sizes.items()}
    )


def source(weights: dict[str, float], seed: int = 0, shuffle: bool = True, **sizes: int):
    return MixedPromptSource(mixed(**sizes), weights, seed=seed, shuffle=shuffle)


def test_prompts_of_all_sources_have_an_index_and_the_name_of_their_source() -> None:
    prompts = mixed(a=2, b=3)
    assert len(prompts) == 5
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [prompt.source for prompt in prompts] == ["a", "a", "b", "b", "b"]
    assert [prompt.index for prompt in prompts[1:3]] == [1, 2]
    assert prompts[-1].token_ids.tolist() == make_prompt(2).token_ids.tolist()
    with pytest.raises(IndexError):
        prompts[5]
    of_a, of_b = of_each_source(prompts, np.array([4, 0, 1])).values()
    assert of_a.tolist() == [False, True, True] and of_b.tolist() == [True, False, False]


def test_draws_by_hand() -> None:
    """Weights 2 and 1: a is due at 0.75, 2.25, 3.75, ..., b at 1.5, 4.5, ... draws."""
    two_to_one = source({"a": 2, "b": 1}, shuffle=False, a=4, b=4)
    batch, cursor = two_to_one.batch(0, 6)
    assert batch.indices == [0, 4, 1, 2, 5, 3]
    assert cursor == 6


weights_of_sources = st.lists(
    st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, 7.5, 1000.0]), min_size=1, max_size=5
)


@given(weights_of_sources, st.integers(0, 5000))
def test_each_source_has_its_share_of_any_number_of_draws(weights: list[float], cursor: int):
    shares = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    counts = draws_before(cursor, shares)
    assert sum(counts) == cursor
    assert all(abs(count - cursor * share) < 2 for count, share in zip(counts, shares, strict=True))
    more = draws_before(cursor + 1, shares)
    assert sum(b - a for a, b in zip(counts, more, strict=True)) == 1
    assert all(b >= a for a, b in zip(counts, more, strict=True)), "no draw is taken back"


@given(st.integers(0, 200), st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 9))
def test_batches_from_a_cursor_are_one_sequence(start: int, sizes: list[int], seed: int):
    """Whatever the sizes of the batches: as one draw at a time. No prompt is twice in a batch."""
    weights = {"a": 3.0, "b": 1.0, "c": 0.5}
    mix = source(weights, seed, a=20, b=7, c=9)
    one_at_a_time: list[int] = []
    cursor = start
    while len(one_at_a_time) < 200:
        batch, cursor = mix.batch(cursor, 1)
        one_at_a_time += batch.indices
    cursor = start
    for size in sizes:
        batch, after = mix.batch(cursor, size)
        assert len(set(batch.indices)) == size
        drawn = one_at_a_time[cursor - start : after - start]
        assert batch.indices == list(dict.fromkeys(drawn))
        cursor = after


def test_a_small_source_is_not_drawn_twice_in_a_batch() -> None:
    mix = source({"a": 1, "b": 1}, a=100, b=2)
    batch, cursor = mix.batch(0, 20)
    assert Counter(prompt.source for prompt in batch) == {"a": 18, "b": 2}
    assert cursor > 20
    mix.check_sizes(4)
    with pytest.raises(PromptError, match="a batch has 10 prompts of b, which has 2; lower its"):
        mix.check_sizes(20)
    with pytest.raises(PromptError, match="a batch needs 103 prompts and there are 102"):
        mix.batch(0, 103)


def test_a_million_draws_cost_no_more_than_one() -> None:
    mix = source({"a": 1e-3, "b": 1.0}, a=10, b=100)
    batch, cursor = mix.batch(10**9, 50)
    assert len(batch) == 50 and cursor < 10**9 + 60
    assert replace(batch[0], index=0).source == "b"
