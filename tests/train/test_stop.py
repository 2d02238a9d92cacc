"""SIGUSR1 to one rank: all end after the step, with a checkpoint, and the resumed run ends as
an undisturbed one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.ranks import Ended, run_ranks
from tests.fault_injection.bitwise_diff import first_difference
from tests.support.training_runs import base_config, records, tiny_model

VERIFIER = Path(__file__).with_name("stopping_verifier.py")


def config(folder: Path, model: str, name: str, *, stop_after: int) -> dict[str, Any]:
    """Four steps on TP 2; rank 1 alone is signalled in the step after ``stop_after`` records."""
    run_dir = folder / name
    options = {"metrics": str(run_dir / "metrics.jsonl"), "rank": 1, "records": stop_after}
    return base_config(
        model,
        run_dir,
        data={"verifier": f"{VERIFIER}:score", "verifier_options": options},
        parallel={"tensor_model_parallel_size": 2},
        training={"steps": 4},
        evaluation={"at_start": False},
        checkpoint={"save_interval": 4, "keep": 1},
    )


def run(folder: Path, wanted: dict[str, Any]) -> list[Ended]:
    folder.mkdir()
    return run_ranks(wanted, 2, folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("stop_model"))


@pytest.mark.slow
def test_one_rank_is_asked_and_all_stop_with_a_checkpoint(model, tmp_path):
    whole = run(tmp_path / "a", config(tmp_path, model, "whole", stop_after=-1))
    assert [rank.code for rank in whole] == [0, 0]

    wanted = config(tmp_path, model, "stopped", stop_after=1)
    run_dir = tmp_path / "stopped"
    stopped = run(tmp_path / "b", wanted)
    assert [rank.code for rank in stopped] == [0, 0]
    folder = run_dir / "checkpoints" / "step_000002"
    line = f"stopped by SIGUSR1 after step 2; start again to resume from {folder}"
    assert line in stopped[0].text and "stopped by" not in stopped[1].text
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000002"]
    assert [record["step"] for record in records(run_dir)] == [1, 2]
    assert not (run_dir / "summary.json").exists() and not (run_dir / "hf").exists()

    resumed = run(tmp_path / "c", wanted)
    assert [rank.code for rank in resumed] == [0, 0] and f"resumed from {folder}" in resumed[0].text
    assert first_difference(run_dir, tmp_path / "whole") == ""
