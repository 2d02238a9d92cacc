"""Waits between requests that fail."""

from __future__ import annotations

import pytest

from megatron_gspo.servers.backoff import Backoff


@pytest.mark.parametrize(
    ("failures", "longest"),
    [(1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 30.0), (5000, 30.0)],
)
def test_waits_double_up_to_the_longest(failures: int, longest: float) -> None:
    """After 5000 failures, hours of a server that is down, 2**failures is no float."""
    waits = [Backoff(0.5, 30.0).seconds(failures) for _ in range(200)]
    assert longest / 2 <= min(waits) < 0.6 * longest
    assert 0.9 * longest < max(waits) <= longest


def test_no_wait() -> None:
    assert Backoff(0.0).seconds(3) == 0.0
