"""Ranks that die, hang or have another config."""

from __future__ import annotations

from pathlib import Path

from tests.support.doctor_processes import (
    TP2,
    arrive_and_hang,
    arrive_and_leave,
    doctor,
    faults,
    impatient,
    ready_and_hang,
    table,
)


def test_ranks_that_are_lost_later(tmp_path):
    first, *_ = doctor(tmp_path, world=3, others={0: impatient, 1: arrive_and_leave, 2: arrive_and_hang})
    assert first.code == 2
    lost = [text for level, check, text in table(first) if (level, check) == ("error", "ranks.silent")]
    assert [text.split(";")[0] for text in lost] == ["ranks 1-2: sent no report, the last check that it began: nothing"]


def test_a_rank_that_hangs_within_an_exchange(tmp_path):
    first, _ = doctor(tmp_path, world=2, others={0: impatient, 1: ready_and_hang})
    assert first.code == 2
    assert faults(first) == [("error", "ranks.silent"), ("error", "groups.late")]
    late = table(first)[-1][2]
    assert late.startswith("rank 0: not done after 1 s, in groups; a run would hang there as well")


def test_a_rank_with_another_config(config_file, tmp_path):
    file = config_file()
    other = Path(tmp_path / "other.yaml")
    other.write_text(file.read_text().replace("seed: 7", "seed: 8"))
    first, second = doctor(tmp_path, str(file), TP2, world=2, own_arguments={1: (str(other), TP2)})
    assert (first.code, second.code) == (2, 2)
    assert faults(first) == [("error", "config.ranks")]
    assert "rank 1 loaded no config, or another than rank 0" in first.out
