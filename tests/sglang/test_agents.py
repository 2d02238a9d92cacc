"""Runs of agents on a real server: histories that branch, and what they yield must be exact."""

from __future__ import annotations

from pathlib import Path

from tests.sglang.test_training import AGREEMENT, run
from tests.support import agent_marks
from tests.support.ties import FLIPS
from tests.support.training_runs import check_ledger
from tests.train.test_agents import BRANCHING, ENV

MARKS = agent_marks.__file__


def test_runs_with_branches_on_two_ranks(
    sglang_url: str, sglang_model: str, tmp_path: Path
) -> None:
    """Log-probs and experts of every generated token are those of the trainer."""
    steps = run(
        sglang_model,
        tmp_path / "run",
        [sglang_url],
        2,
        parallel={"expert_model_parallel_size": 2},
        agents=BRANCHING,
        rollout={"max_response_length": 6},
        data={"verifier": None},
        routing={"replay": "r3"},
        training={"steps": 3, "max_tokens_per_micro_batch": 640},
        evaluation={"at_start": False},
    )
    assert len(steps) == 3
    for record in steps:
        assert record["agents/rows"] == 48 and record["agents/calls"] == 64
        assert record["mismatch/abs_diff_max"] < AGREEMENT
        assert record["routing/rollout_flip_rate"] < FLIPS
        assert record["staleness/max"] == 0.0
        assert record["rollout/requests"] >= 64
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=0)


def test_runs_go_on_while_the_trainer_works(
    sglang_url: str, sglang_model: str, tmp_path: Path
) -> None:
    """Runs that begin before a weight update are trained in the step after it."""
    marks = tmp_path / "marks"
    marks.mkdir()
    steps = run(
        sglang_model,
        tmp_path / "run",
        [sglang_url],
        agents=BRANCHING
        | {"function": f"{MARKS}:marking", "env": ENV | {agent_marks.FOLDER: str(marks)}},
        callbacks=[f"{MARKS}:NextBatchHasBegun"],
        rollout={"max_response_length": 6, "max_staleness": 1, "overlap": True},
        data={"verifier": None},
        training={"steps": 4, "max_tokens_per_micro_batch": 640},
        evaluation={"at_start": False},
    )
    assert [record["staleness/max"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    assert steps[0]["mismatch/abs_diff_max"] < AGREEMENT
    assert all(AGREEMENT < record["mismatch/abs_diff_max"] for record in steps[1:])
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=1)
