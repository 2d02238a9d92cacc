"""Most likely ids and their log-probs in 6 bytes, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gspo.rollout.top_codec import packed_top, unpacked_top

PAIRS = st.lists(
    st.tuples(
        st.integers(0, 2**31 - 1) | st.integers(0, 2**18 - 1),
        st.floats(max_value=0, width=32) | st.floats(-64, 0, width=32),
    )
)


def bits(log_probs: np.ndarray) -> list[int]:
    """Of each, 0 of both zeros."""
    return (log_probs + np.float32(0)).view(np.uint32).tolist()


@given(PAIRS)
def test_every_pair_comes_back_bit_by_bit(pairs):
    ids = np.array([token for token, _ in pairs], np.int32)
    log_probs = np.array([log_prob for _, log_prob in pairs], np.float32)
    first, second = packed_top(ids, log_probs)
    assert (first.dtype, len(first), len(second)) == (np.uint32, len(pairs), len(pairs))
    ids_again, log_probs_again = unpacked_top(first, second)
    assert (ids_again.dtype, log_probs_again.dtype) == (np.int32, np.float32)
    assert ids_again.tolist() == ids.tolist()
    assert bits(log_probs_again) == bits(log_probs)


SMALL = np.float32(-(2.0**-120))
BEFORE_256 = np.nextafter(np.float32(-256), np.float32(0))


@pytest.mark.parametrize(
    ("token", "log_prob", "size"),
    [
        (0, 0.0, 2),
        (2**18 - 1, -0.0, 2),
        (2**18, -1.0, 4),
        (151_935, -17.25, 2),
        (1, SMALL, 2),
        (1, np.nextafter(SMALL, np.float32(0)), 4),
        (1, np.nextafter(BEFORE_256, np.float32(0)), 2),
        (1, BEFORE_256, 4),
        (1, -np.inf, 4),
        (1, 1e-6, 4),
        (1, np.nan, 4),
    ],
)
def test_what_has_a_code_takes_six_bytes(token, log_prob, size):
    """Beside a pair that always has one."""
    ids = np.array([5, token], np.int32)
    log_probs = np.array([-0.5, log_prob], np.float32)
    first, second = packed_top(ids, log_probs)
    assert first.itemsize + second.itemsize == 4 + size
    again = unpacked_top(first, second)
    assert again[0].tolist() == [5, token]
    assert bits(again[1]) == bits(log_probs)
