"""How large a difference of log-probs is too large."""

from __future__ import annotations

import math

import pytest

from megatron_gspo.tools.doctor.probe import judge_parity


@pytest.mark.parametrize(
    ("dtype", "largest", "level"),
    [
        ("float32", 2e-5, "ok"),
        ("float32", 5e-3, "warning"),
        ("bfloat16", 0.4, "ok"),
        ("bfloat16", 6.0, "error"),
        ("float32", math.nan, "error"),
    ],
)
def test_the_largest_difference_decides(dtype: str, largest: float, level: str) -> None:
    assert judge_parity(1e-6, largest, "sglang", dtype).level == level
