"""The regression check on hand-made results: what it calls lost, worse, gone."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import check_regression
from benchmarks.check_regression import compare, confirm, newest, worse_by
from tests.support.benchmark_results import result, row


def test_worse_by_looks_the_right_way():
    assert worse_by(row(ratio=1.2), row(ratio=1.0)) == pytest.approx(0.2)
    assert worse_by(row(ratio=2.0, better="higher"), row(ratio=2.5, better="higher")) == pytest.approx(0.25)
    assert worse_by(row(ratio=0.8), row(ratio=1.0)) < 0 < worse_by(row(ratio=0.5), row(ratio=0.0))


@pytest.mark.parametrize(
    ("new", "old", "width", "losses", "worse"),
    [
        (1.30, 1.0, 0.05, 1, 0),  # far beyond the spread of both
        (1.30, 1.0, 0.20, 0, 0),  # 1.10 to 1.50 and 0.80 to 1.20 overlap
        (1.20, 1.0, 0.02, 0, 1),  # apart, but as two runs of the same code may be
        (1.04, 1.0, 0.00, 0, 0),  # too small to report
        (0.50, 1.0, 0.01, 0, 0),  # better
    ],
)
def test_a_loss_is_large_and_beyond_the_quartiles(new, old, width, losses, worse):
    found = compare(result(row(ratio=new, width=width)), result(row(ratio=old, width=width)))
    assert (len(found.losses), len(found.worse), found.notes) == (losses, worse, [])
    for line in [*found.losses.values(), *found.worse]:
        assert f"bench: a, against peer: ours / peer 1 -> {new:g}, {round(100 * (new - 1))} % worse" == line


def test_rates_lose_downwards():
    old = result(row(ratio=2.6, better="higher"))
    (line,) = compare(result(row(ratio=1.3, better="higher")), old).losses.values()
    assert line.endswith("2.6 -> 1.3, 100 % worse")
    assert compare(result(row(ratio=5.2, better="higher")), old).losses == {}


def test_rows_that_vanish_are_lost_and_benchmarks_that_did_not_run_are_told():
    old = result(row("a"), row("b"), row("c", benchmark="other"))
    found = compare(result(row("a")), old)
    assert found.losses == {("bench", "b", "peer"): "bench: b, against peer: the row is gone"}
    assert found.notes == ["other did not run"]
    found = compare(result(row("a"), row("b"), failures={"other": "exit code 1"}), old)
    assert found.losses == {("other",): "other failed: exit code 1"} and found.notes == []


def test_a_target_newly_missed_is_lost_where_the_better_quartile_misses_it_too():
    old = result(row(ratio=1.0, target=1.05))
    assert compare(result(row(ratio=1.04, width=0.1, target=1.05)), old).worse == []
    found = compare(result(row(ratio=1.06, width=0.1, target=1.05)), old)
    assert (found.losses, len(found.worse)) == ({}, 1)
    found = compare(result(row(ratio=1.08, width=0.01, target=1.05)), old)
    assert list(found.losses.values()) == ["bench: a, against peer: target <= 1.05 reached before (1), now 1.08"]
    missed_before = result(row(ratio=1.10, target=1.05))
    assert compare(result(row(ratio=1.12, target=1.05)), missed_before).losses == {}


def pair(**ratios):
    """Results of new code, with `ratios` by the row's name, and of old code, in which all are 1."""
    return result(*(row(name, ratio=ratio) for name, ratio in ratios.items())), result(*map(row, ratios))


def confirmed(first, *pairs):
    """What `confirm` finds, and the benchmarks that each of its pairs ran."""
    ran = []

    def run_pair(number, names):
        ran.append(list(names))
        return pairs[number]

    return confirm(first, len(pairs), run_pair, 0.25), ran


def test_a_loss_is_one_that_each_pair_shows_again():
    first = compare(*pair(a=1.5, b=1.5, c=1.5, d=1.1))
    found, ran = confirmed(first, pair(a=1.4, b=1.0, c=1.5, d=1.0), pair(a=1.3, b=1.5, c=0.9, d=1.0))
    assert list(found.losses.values()) == ["bench: a, against peer: ours / peer 1 -> 1.3, 30 % worse"]
    assert [note.split(": ")[2] for note in found.notes] == ["b, against peer", "c, against peer"]
    assert len(found.worse) == 1 and len(first.losses) == 3  # the first findings stay as they were
    assert ran == [["bench"]] * 2


def test_what_is_no_longer_lost_does_not_run_again():
    old = result(row(), row(benchmark="other"))
    slow = result(row(ratio=1.5), row(benchmark="other", ratio=1.5))
    half = result(row(ratio=1.5), row(benchmark="other"))
    found, ran = confirmed(compare(slow, old), (half, old), (old, old), (slow, old))
    assert found.losses == {} and ran == [["bench", "other"], ["bench"]]


def test_a_row_that_is_gone_in_new_code_alone_stays_lost():
    both, without = result(row("a"), row("b")), result(row("a"))
    first = compare(without, both)
    assert confirmed(first, (without, both))[0].losses == first.losses != {}
    assert confirmed(first, (without, without))[0].losses == {}


@pytest.mark.parametrize("failed", [0, 1])
def test_a_pair_of_which_one_failed_clears_nothing(failed):
    first, two = compare(*pair(a=1.5)), list(pair(a=1.0))
    two[failed] = result(failures={"bench": "exit code 1"})
    assert confirmed(first, tuple(two))[0].losses == first.losses
    assert confirmed(first, tuple(two), pair(a=1.0))[0].losses == {}


def test_other_machines_are_told_and_quick_runs_refused():
    machine = result()["hardware"] | {"cores": 64}
    assert "another machine (fast-cpu-64-cores" in compare(result(hardware=machine), result()).notes[0]
    with pytest.raises(ValueError, match="--quick"):
        compare(result(quick=True), result())


def test_the_command_ends_with_1_on_a_loss(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "new.json", tmp_path / "old.json"]

    def run(new, old):
        for file, content in zip(files, (new, old), strict=True):
            file.write_text(json.dumps(content))
        monkeypatch.setattr("sys.argv", ["check_regression", str(files[0]), "--against", str(files[1])])
        return check_regression.main(), capsys.readouterr().out

    assert run(result(row()), result(row())) == (0, "nothing lost, 0 worse, of 1 rows\n")
    code, text = run(result(row(ratio=2.0)), result(row()))
    assert code == 1 and text.startswith("LOST: bench: a") and text.endswith("1 LOST, 0 worse, of 1 rows\n")
    assert run(result(quick=True), result()) == (2, "")


def test_the_newest_result_is_taken(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no result"):
        newest(tmp_path)
    for name, age in {"machine.json": 10, "partial.json": 5, "latest.json": 1}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert newest(tmp_path).name == "partial.json"
