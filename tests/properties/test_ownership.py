"""Zigzag ownership: the context ranks share out every sequence, in equal parts of equal work."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gspo.parallel import zigzag_indices

widths = st.lists(st.integers(0, 6), max_size=7)  # of a chunk, by sequence


def bounds_of(chunk_widths, cp_size):
    bounds = [0]
    for width in chunk_widths:
        bounds.append(bounds[-1] + 2 * cp_size * width)
    return bounds


@given(chunk_widths=widths, cp_size=st.integers(1, 9))
def test_every_position_has_one_owner(chunk_widths, cp_size):
    bounds = bounds_of(chunk_widths, cp_size)
    owned = [zigzag_indices(bounds, rank, cp_size) for rank in range(cp_size)]
    assert sorted(torch.cat(owned).tolist()) == list(range(bounds[-1]))
    assert {len(part) for part in owned} == {bounds[-1] // cp_size}


@given(chunk_widths=widths, cp_size=st.integers(1, 9))
def test_causal_work_is_equal_and_order_is_kept(chunk_widths, cp_size):
    """(query, key) pairs under a causal mask, sequence by sequence."""
    bounds = bounds_of(chunk_widths, cp_size)
    for start, end in zip(bounds, bounds[1:], strict=False):
        work = set()
        for rank in range(cp_size):
            owned = zigzag_indices(bounds, rank, cp_size)
            inside = owned[(owned >= start) & (owned < end)]
            assert (inside.diff() > 0).all()
            work.add(int((inside - start + 1).sum()))
        assert len(work) == 1
    assert (zigzag_indices(bounds, 0, cp_size).diff() > 0).all()
