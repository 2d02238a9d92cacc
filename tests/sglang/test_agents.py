"""Runs of agents on a real server: histories that branch, and what they yield must be exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from tests.sglang.conftest import StartServers
from tests.sglang.test_training import AGREEMENT, run
from tests.support.ties import FLIPS
from tests.support.training_runs import WORD, check_ledger
from tests.train.test_agents import BRANCHING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("agents") / "model"
    write_tiny_model(
        folder, TinyModel(hidden=32, layers=2, experts=4, expert_width=16), words=[WORD]
    )
    return str(folder)


@pytest.fixture(scope="module")
def urls(start_servers: StartServers, model: str) -> list[str]:
    return start_servers(count=1, model=model).urls


def test_runs_with_branches_on_two_ranks(urls: list[str], model: str, tmp_path: Path) -> None:
    """Log-probs and experts of every generated token are those of the trainer."""
    steps = run(
        model,
        tmp_path / "run",
        urls,
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


def test_runs_go_on_while_the_trainer_works(urls: list[str], model: str, tmp_path: Path) -> None:
    """Over weight updates: a run whose calls are of two versions is trained in time."""
    steps = run(
        model,
        tmp_path / "run",
        urls,
        agents=BRANCHING,
        rollout={"max_response_length": 6, "max_staleness": 1, "overlap": True},
        data={"verifier": None},
        training={"steps": 4, "max_tokens_per_micro_batch": 640},
        evaluation={"at_start": False},
    )
    assert [record["staleness/max"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    assert steps[0]["mismatch/abs_diff_max"] < AGREEMENT < steps[1]["mismatch/abs_diff_max"]
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=1)
