"""The arithmetic of the packing benchmark, by hand and beside the schedule's own report."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import packing
from benchmarks.packing import Layout, draw_lengths, fixed_count, ours, share_row, shares, sorted_padded
from megatron_gspo.data.schedule import padded_length, schedule_report


def test_shares_by_hand():
    # rank 0 pads 3 and 5 to 2 x 5, rank 1 holds 7: 15 tokens on 17, 10 beside a mean of 8.5
    layout = Layout("l", 2, 3)
    found = shares([[[0, 1]], [[2]]], [3, 5, 7], layout, padded=True)
    assert found["padding"] == pytest.approx(100 * 2 / 17)
    assert found["rank imbalance"] == found["waiting"] == pytest.approx(100 * (10 / 8.5 - 1))
    # end to end, to multiples of 4 and 8: (4 + 8) -> 16 and 8; each rank waits in another micro-batch
    layout = Layout("l", 2, 3, multiple=4, total=8)
    found = shares([[[0, 1], []], [[], [2]]], [3, 5, 7], layout, padded=False)
    assert found["padding"] == pytest.approx(100 * (1 - 15 / 24))
    assert found["rank imbalance"] == pytest.approx(100 * (16 / 12 - 1))
    assert found["waiting"] == pytest.approx(100 * (24 / 12 - 1))
    # a pipeline pads both to the longest
    found = shares([[[0, 1]], [[2]]], [3, 5, 7], Layout("l", 2, 3, one_length=True), padded=False)
    assert found == {"padding": pytest.approx(100 / 16), "rank imbalance": 0.0, "waiting": 0.0}


def test_ours_is_counted_as_the_schedule_counts_it():
    layout = packing.LAYOUTS["512 on dp 8, CP 2, TP 4"]
    lengths = draw_lengths("bimodal", layout.sequences, 3)
    plan = ours([padded_length(length, layout.multiple) for length in lengths], layout)
    report = schedule_report(plan, lengths, sequence_multiple=layout.multiple, total_multiple=layout.total)
    found = shares(plan, lengths, layout, padded=False)
    for name, value in {"padding": report.padding_share, "rank imbalance": report.rank_imbalance,
                        "waiting": report.step_imbalance}.items():  # fmt: skip
        assert found[name] == pytest.approx(100 * value)


def test_padded_peers_by_hand(monkeypatch):
    monkeypatch.setattr(packing, "MAX_TOKENS", 12)
    layout = Layout("l", 2, 5)
    # 6 4 | 4 3 2, each at most 12 when padded; the second has 12 = 3 x 4
    assert sorted_padded([4, 2, 6, 3, 4], layout) == [[[2, 0]], [[4, 3, 1]]]
    monkeypatch.setattr(packing, "FIXED", 2)
    assert fixed_count([4, 2, 6, 3, 4], layout) == [[[0, 1], [4]], [[2, 3], []]]


@pytest.mark.parametrize(("kind", "mean", "cut"), [("log-normal", 2450, 0.01), ("geometric", 2000, 0.0003),
                                                   ("bimodal", 3690, 0.05)])  # fmt: skip
def test_lengths_are_what_is_said_of_them(kind, mean, cut):
    lengths = np.array(draw_lengths(kind, 50_000, 0))
    assert lengths.mean() - 288 == pytest.approx(mean, rel=0.02)  # 288: the mean prompt
    assert lengths.min() > packing.PROMPTS[0] and lengths.max() <= packing.LIMIT + packing.PROMPTS[1]
    assert np.mean(lengths >= packing.LIMIT + packing.PROMPTS[0]) == pytest.approx(cut, rel=0.25, abs=2e-4)
    assert draw_lengths(kind, 9, 1) != draw_lengths(kind, 9, 2)


def test_shares_too_small_to_matter_are_equal():
    row = share_row("n", [0.0, 0.0005], [0.0001, 0.003], peer_name="p")
    assert row.ratio.median == 1.0 and row.ours.median == pytest.approx(0.00025)
