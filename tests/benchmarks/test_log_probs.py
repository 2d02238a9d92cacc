"""The grid and the rows of the log-prob benchmark, and what counts as the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.log_prob_worker import Case, difference
from benchmarks.log_probs import LARGE, not_compared, rows_of, share_of_peak


def once(peak: float, apart: float) -> dict[str, float]:
    return {"peak": peak, "beyond_gradients": peak - 0.1, "difference": apart}


def report(case: Case) -> dict[str, Any]:
    return {
        "case": vars(case),
        "once": {
            "ours": once(0.2, 0.0),
            "a": once(3.0, 9e-6),
            "b": once(0.8, 2e-6),
            "wrong": once(0.1, 2e-5),
        },
        "failed": {"c": "ImportError: none"},
        "turns": {
            "ours": [[1.0, 1.0]] * 3,
            "a": [[2.0, 2.0]] * 3,
            "b": [[4.0, 4.0]] * 3,
            "wrong": [[0.5, 0.5]] * 3,
        },
    }


def test_only_peers_of_the_same_result_are_beaten_and_the_target_is_beside_the_best():
    case = Case(1024, LARGE, 128)
    a, b, peak = rows_of(case, report(case))
    assert (a.peer_name, a.ratio.median, a.target, a.met) == ("a", 0.5, 1.0, True)
    assert (b.peer_name, b.ratio.median, b.target) == ("b", 0.25, None)
    assert (peak.peer_name, peak.ours.median, peak.peer.median, peak.target, peak.met) == (
        "b",
        0.2,
        0.8,
        0.25,
        True,
    )
    assert a.name == "log-prob + entropy, gradient, 1k x 152k: time"
    reasons = not_compared([report(case)])
    assert reasons["c, TP 1"] == "ImportError: none" and "2e-05" in reasons["wrong, float32 inputs"]
    assert not {"a, float32 inputs", "b, float32 inputs"} & reasons.keys()


def test_share_of_peak_by_hand():
    """8 x 1000 x 1000 x 100 operations in a second are 0.0008 TFLOP/s; without gradient a
    fourth of them.
    """
    case = Case(1000, 1000, 100)
    assert share_of_peak(case, report(case), 0.0016).endswith("0 TFLOP/s, 50 % of the peak")
    assert share_of_peak(Case(1000, 1000, 100, gradient=False), report(case), 0.0002).endswith(
        "100 % of the peak"
    )


def test_difference_is_relative_to_the_largest_entry_and_forgives_a_rounding_of_bfloat16():
    ones = torch.ones(2)
    assert difference(
        [ones, torch.tensor([4.0, 0.5])], [ones, torch.tensor([4.0, 0.1])]
    ) == pytest.approx(0.1)
    low = [torch.tensor([256.0, 100.0], dtype=torch.bfloat16)]
    assert difference(low, [torch.tensor([256.0, 100.5], dtype=torch.bfloat16)]) == pytest.approx(
        0.5 / 256 * 2.56e-3
    )
    assert difference(low, [torch.tensor([258.0, 100.0], dtype=torch.bfloat16)]) > 1e-5
    assert difference(low, [torch.tensor([256.0, 100.5])]) == pytest.approx(0.5 / 256)
