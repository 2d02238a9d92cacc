"""Columns of tokens: selections are slices, and values come back to their samples."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.data import columns as module
from megatron_gspo.data.columns import Columns, ranges

LENGTHS = (2, 0, 3, 1, 4)


def numbered() -> Columns:
    """Samples 0 to 4, whose tokens are numbered in one column."""
    return Columns.of(range(5), np.array(LENGTHS), number=np.arange(10))


def test_a_column_is_a_view_where_its_samples_follow_each_other():
    columns = numbered()
    assert columns["number"].base is columns.arrays["number"]
    assert columns.sample_ids.tolist() == [0, 0, 2, 2, 2, 3, 4, 4, 4, 4]
    assert columns.chosen([2, 3])["number"].tolist() == [2, 3, 4, 5]
    assert columns.chosen([2, 3])["number"].base is columns.arrays["number"]
    assert columns.chosen([4, 0])["number"].tolist() == [0, 1, 6, 7, 8, 9]
    assert columns.chosen([])["number"].tolist() == []
    assert columns.of_sample("number", 2).tolist() == [2, 3, 4]
    assert columns.of_sample("number", 1).tolist() == []


def test_a_selection_is_numbered_by_its_order():
    chosen = numbered().chosen([0, 2, 4]).renumbered([4, 3, 2])
    assert chosen.positions.tolist() == [0, 2] and chosen.lengths.tolist() == [4, 3]
    assert chosen["number"].tolist() == [6, 7, 8, 9, 2, 3, 4]
    assert len(numbered().renumbered([])) == 0 == len(Columns.of([], np.zeros(0)).renumbered([3]))


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [1, 2], [2, 4], []])
def test_a_column_is_added_to_any_selection(positions):
    chosen = numbered().chosen(positions)
    added = chosen.with_column("twice", 2 * chosen["number"])
    assert added["twice"].tolist() == [2 * n for n in chosen["number"].tolist()]
    assert added["number"].tolist() == chosen["number"].tolist()
    assert "twice" not in chosen and added.positions.tolist() == positions
    for position in positions:
        assert (
            added.of_sample("twice", position) == 2 * chosen.of_sample("number", position)
        ).all()
    assert list(added.only("twice").arrays) == ["twice"]
    with pytest.raises(ValueError, match="column twice has 11 values; the samples have"):
        chosen.with_column("twice", np.zeros(11))


def test_values_of_samples_and_of_their_tokens():
    columns = numbered().chosen([0, 1, 4])
    assert columns.repeat(np.array([5, 6, 7])).tolist() == [5, 5, 7, 7, 7, 7]
    assert columns.sums(columns["number"]).tolist() == [1, 0, 30]
    parts = columns.split(columns["number"])
    assert {i: tokens.tolist() for i, tokens in parts.items()} == {
        0: [0, 1],
        1: [],
        4: [6, 7, 8, 9],
    }
    assert ranges(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]


def test_pieces_have_every_sample_once(monkeypatch):
    columns = Columns.of(range(6), np.array([2, 3, 9, 1, 1, 4]), number=np.arange(20))
    assert [piece.positions.tolist() for piece in columns.pieces()] == [[0, 1, 2, 3, 4, 5]]
    monkeypatch.setattr(module, "_PIECE", 7)
    pieces = list(columns.pieces())
    assert [piece.positions.tolist() for piece in pieces] == [[0, 1], [2], [3, 4, 5]], (
        "a longer sample is a piece of its own"
    )
    assert np.concatenate([piece["number"] for piece in pieces]).tolist() == list(range(20))
    assert [len(piece) for piece in Columns.of([], np.zeros(0)).pieces()] == [0]
