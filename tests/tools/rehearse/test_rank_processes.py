"""Each rank has a process; records come back in order, and a failure is one line with the rest
of the output.
"""

from __future__ import annotations

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.rehearse.rank_processes import RankJob, rehearse_ranks
from megatron_gspo.tools.rehearse.roles import PlayedRank

PLAYED = (PlayedRank(0, ("first stage",), (0, 1)), PlayedRank(1, ("last stage",), (1,)))


def job(
    config: str = "config.yaml", overrides: tuple[str, ...] = (), layers: int | None = None
) -> RankJob:
    return RankJob(config, overrides, 2, layers, 2.0, module="tests.tools.rehearse.stub_rank")


def run(made: RankJob, played=PLAYED, jobs: int = 2):
    ended = []
    rehearsed = rehearse_ranks(
        made, played, jobs, lambda rank, result: ended.append((rank.rank, result.rank))
    )
    assert sorted(ended) == [(rank.rank, rank.rank) for rank in played]
    return rehearsed


def test_records_have_their_roles():
    records, failed = run(job(overrides=("a.b=1",), layers=3))
    assert [(record.rank, record.world, record.roles, record.stands_for) for record in records] == [
        (0, 2, ("first stage",), (0, 1)),
        (1, 2, ("last stage",), (1,)),
    ]
    assert records[0].notes == ("a.b=1", "3 layers", "imbalance 2.0", "1")
    assert failed == []


def test_a_rank_that_breaks_leaves_the_others():
    records, (failure,) = run(job("broken"), jobs=1)
    assert [record.rank for record in records] == [0]
    assert (failure.rank, failure.message) == (1, "RuntimeError: no kernel for aten.fft")
    assert "a warning" in failure.output and "stub_rank.py" in failure.output


def test_a_killed_process_is_a_failure():
    _, (failure,) = run(job("killed"), played=PLAYED[:1])
    assert "ended by signal 9" in failure.message


def test_invalid_input_stops_the_rehearsal():
    with pytest.raises(InputError, match="^model.path: is no directory; give another$"):
        rehearse_ranks(job("invalid"), PLAYED[:1], 1, lambda *_: None)
