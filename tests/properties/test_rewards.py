"""Advantages compare responses within their group and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gspo.algorithms import (
    effective_sample_size,
    group_advantages,
    overlong_penalty,
    zero_variance_groups,
)

STD, BASELINE = ("sample", "population", "none"), ("mean", "leave_one_out")
# Eighths, so that shifting and doubling them is exact.
rewards = st.integers(-40, 40).map(lambda value: value / 8)
responses = st.lists(st.tuples(rewards, st.integers(-3, 3)), min_size=1, max_size=24)
options = st.fixed_dictionaries({"std": st.sampled_from(STD), "baseline": st.sampled_from(BASELINE)})


def tensors(pairs):
    values, ids = zip(*pairs, strict=True)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(ids)


@given(pairs=responses, options=options, shift=st.integers(-1000, 1000))
def test_a_shift_of_a_group_changes_nothing(pairs, options, shift):
    values, ids = tensors(pairs)
    moved = values + shift * (ids + 5)  # each group by its own amount
    torch.testing.assert_close(
        group_advantages(moved, ids, **options),
        group_advantages(values, ids, **options),
        rtol=1e-5,
        atol=1e-6,
    )


@given(pairs=responses, options=options, factor=st.sampled_from([0.125, 2.0, 64.0]))
def test_a_scale_shows_only_without_std(pairs, options, factor):
    values, ids = tensors(pairs)
    expected = group_advantages(values, ids, **options) * (factor if options["std"] == "none" else 1)
    torch.testing.assert_close(
        group_advantages(factor * values, ids, **options), expected, rtol=1e-6, atol=1e-7
    )


@given(pairs=responses, options=options, data=st.data())
def test_order_and_names_of_groups_change_nothing(pairs, options, data):
    values, ids = tensors(pairs)
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    names = torch.tensor(
        data.draw(st.lists(st.integers(-(2**40), 2**40), min_size=7, max_size=7, unique=True))
    )
    got = group_advantages(values[order], names[ids[order] + 3], **options)
    torch.testing.assert_close(got, group_advantages(values, ids, **options)[order], rtol=1e-6, atol=1e-7)


@given(pairs=responses, options=options)
def test_a_group_is_on_its_own(pairs, options):
    values, ids = tensors(pairs)
    whole = group_advantages(values, ids, **options)
    for group in ids.unique():
        alone = group_advantages(values[ids == group], ids[ids == group], **options)
        torch.testing.assert_close(alone, whole[ids == group], rtol=1e-6, atol=1e-7)


@given(pairs=responses)
@pytest.mark.parametrize("baseline", BASELINE)
@pytest.mark.parametrize("std", STD)
def test_sums_signs_and_sizes_within_a_group(std, baseline, pairs):
    values, ids = tensors(pairs)
    advantages = group_advantages(values, ids, std=std, baseline=baseline).double()
    for group in ids.unique():
        a, r = advantages[ids == group], values[ids == group]
        if len(r.unique()) == 1:
            continue
        assert a.sum().item() == pytest.approx(0, abs=1e-4)
        assert ((a > 0) == (r > r.mean() + 1e-9)).all()
        spread = (r - r.mean()).square().sum().item()
        size = {"sample": len(r) - 1, "population": len(r), "none": spread}[std]
        size *= (len(r) / (len(r) - 1)) ** 2 if baseline == "leave_one_out" else 1
        assert a.square().sum().item() == pytest.approx(size, rel=1e-5)


@given(pairs=responses, options=options)
def test_a_group_without_variance_is_what_the_filter_drops(pairs, options):
    values, ids = tensors(pairs)
    keep, dropped, total = zero_variance_groups(values, ids)
    advantages = group_advantages(values, ids, **options)
    equal = [group for group in ids.unique() if len(values[ids == group].unique()) == 1]
    assert (dropped, total) == (len(equal), len(ids.unique()))
    assert keep.tolist() == [group not in equal for group in ids]
    assert not advantages[~keep].any()


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    max_length=st.integers(1, 200),
    buffer=st.integers(1, 200),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_overlong_penalty_falls_from_0_to_the_factor(lengths, max_length, buffer, factor):
    buffer = min(buffer, max_length)
    got = overlong_penalty(
        torch.tensor(lengths), max_length=max_length, buffer=buffer, factor=factor
    ).tolist()
    for length, value in zip(lengths, got, strict=True):
        part = min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)
        assert value == pytest.approx(-factor * part, abs=1e-6)


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50), factor=st.floats(1e-2, 1e2))
def test_effective_sample_size_is_a_fraction_and_has_no_scale(weights, factor):
    w = torch.tensor(weights, dtype=torch.float64)
    size = effective_sample_size(w)
    assert 1 / len(weights) - 1e-9 <= size <= 1 + 1e-9
    assert effective_sample_size(factor * w) == pytest.approx(size)
