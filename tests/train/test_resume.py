"""Stopping a run by SIGKILL and starting it again: the result is bitwise that of an undisturbed
run.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from megatron_gspo.tracking import read_metrics
from tests.fault_injection.bitwise_diff import first_difference
from tests.fault_injection.kill_and_resume import Reference, _has_reached
from tests.fault_injection.kill_points import Target
from tests.fault_injection.process_harness import (
    Life,
    RandomKill,
    live,
    live_under_torchrun,
    warm_up,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    """Six steps on two processes, TP 2 and EP 2, left alone: checkpoints after 2, 4 and 6, of which
    two are kept.

    Its verifier draws from Python's, numpy's and torch's global generators.
    """
    warm_up()
    return Reference(tmp_path_factory.mktemp("runs"), 2, [])


def resume(reference: Reference, run_dir: Path, *overrides: str, processes: int = 2) -> Life:
    config = reference.config(run_dir, *overrides)
    life = live(config, run_dir.with_suffix(".life"), processes, None, grace=1.0)
    assert life.finished and not life.orphans, life.log[-3000:]
    return life


def stopped_after_four(reference: Reference, tmp_path: Path) -> Path:
    """The reference as if it had been killed in its fifth step."""
    run_dir = tmp_path / "run"
    shutil.copytree(reference.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_000006")
    shutil.rmtree(run_dir / "hf")
    assert (run_dir / "checkpoints" / "step_000004" / "rollout.bin").is_file()
    return run_dir


# event, which of them (a share of all), rank, whether all ranks are killed
KILLS = {
    "weight update": ("weight update", 0.8, 1, False),
    "save": ("save", 0.6, 0, True),
    "publication": ("publication", 0.99, 0, False),
}


@pytest.mark.parametrize("name", KILLS)
def test_killed_at_its_worst_moments(reference, tmp_path, name):
    kind, share, rank, kills_all = KILLS[name]
    target = Target(kind, max(1, round(share * reference.life.counts[rank][kind])), rank, kills_all)
    run_dir = tmp_path / "run"
    killed = live(reference.config(run_dir), tmp_path / "killed", 2, target, grace=0.5)
    assert killed.was_killed and not killed.orphans and not (run_dir / "summary.json").exists()
    assert "resumed from" in resume(reference, run_dir).log
    assert first_difference(run_dir, reference.run_dir) == ""


def holding(run_dir: Path, records: int) -> list[str]:
    """Overrides: the writers of checkpoints are held up until metrics.jsonl has so many records."""
    options = {
        "metrics": str(run_dir / "metrics.jsonl"),
        "go": str(run_dir.with_suffix(".go")),
        "records": records,
    }
    return [
        f"data.verifier={Path(__file__).with_name('holding_verifier.py')}:score",
        f"data.verifier_options={json.dumps(options)}",
    ]


def test_training_goes_on_while_a_checkpoint_is_written(reference, tmp_path):
    """The checkpoint of step 2 can't be written before step 4: a run that waited for it would
    wait forever.
    """
    run_dir = tmp_path / "run"
    life = resume(reference, run_dir, *holding(run_dir, records=4))  # of the steps 0 to 3
    assert first_difference(run_dir, reference.run_dir) == ""
    # the rollouts of the third step waited with it
    assert (run_dir / "checkpoints" / "step_000004" / "rollout.bin").is_file()
    assert "not kept" not in life.log


def test_a_kill_while_training_and_writing_loses_that_checkpoint_only(reference, tmp_path):
    run_dir = tmp_path / "run"
    config = reference.config(run_dir, *holding(run_dir, records=100))
    count = round(0.6 * reference.life.counts[0]["gradients"])  # in the fourth step
    killed = live(config, tmp_path / "killed", 2, Target("gradients", count, 0, False), grace=0.5)
    assert killed.was_killed and not killed.orphans
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2, 3]
    [partial] = (run_dir / "checkpoints").iterdir()
    assert partial.name.startswith(".partial_000002_") and (partial / "rollout.bin").is_file()
    assert "resumed from" not in resume(reference, run_dir, "checkpoint.async_save=false").log
    assert first_difference(run_dir, reference.run_dir) == ""


def test_a_broken_checkpoint_is_passed_over_and_rollouts_are_not_generated_again(
    reference, tmp_path
):
    run_dir = tmp_path / "run"
    shutil.copytree(reference.run_dir, run_dir)
    broken = run_dir / "checkpoints" / "step_000006"
    file = sorted(broken.glob("*.distcp"))[-1]
    size = file.stat().st_size
    os.truncate(file, size // 2)
    life = resume(reference, run_dir)
    fault = (
        f"{broken} is incomplete ({file.name}: {size // 2} of {size} bytes): resuming from"
        " step_000004"
    )
    assert life.log.count(fault) == 1  # one rank prints it
    assert f"rollouts kept in {broken.parent}/step_000004: used" in life.log
    # of the steps 5 and 6 and the last evaluation, step 5 needs no engine and no verifier
    assert [counts["generation"] for counts in life.counts] == [2, 2]
    assert [counts["verification"] for counts in life.counts] == [2, 2]
    assert first_difference(run_dir, reference.run_dir) == ""


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (1, ["parallel.tensor_model_parallel_size=1"]),
        (2, ["parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=2"]),
    ],
    ids=["one process", "pp2"],
)
def test_goes_on_in_another_layout(reference, tmp_path, processes, layout):
    """Up to rounding: the kept rollouts are the same, and so is their update."""
    run_dir = stopped_after_four(reference, tmp_path)
    life = resume(
        reference, run_dir, *layout, "parallel.expert_model_parallel_size=1", processes=processes
    )
    assert "resumed from" in life.log
    ours = read_metrics(run_dir)
    theirs = read_metrics(reference.run_dir)
    assert ours[:5] == theirs[:5]
    for name, value in theirs[5].items():
        # Another layout moves other bytes.
        if not name.startswith(("time/", "perf/", "routing/bytes_moved")):
            assert ours[5][name] == pytest.approx(value, rel=2e-3, abs=1e-4), name
    assert ours[6]["entropy"] == pytest.approx(theirs[6]["entropy"], rel=2e-3)
    # The verifier's noise.
    assert ours[6]["eval/accuracy"] == pytest.approx(theirs[6]["eval/accuracy"], abs=2e-3)


def test_a_state_of_another_version_is_one_line(reference, tmp_path):
    run_dir = stopped_after_four(reference, tmp_path)
    file = run_dir / "checkpoints" / "step_000004" / "state.json"
    content = json.loads(file.read_text())
    del content["state"]["cursor"]
    file.write_text(json.dumps(content))
    life = live(reference.config(run_dir), tmp_path / "life", 2, None, grace=1.0)
    assert not life.finished
    assert "state.json lacks cursor: it is of another version of this program" in life.log
    assert "Traceback" not in life.log


@pytest.mark.slow  # the kills above, and torchrun in tests/bad_input/test_ranks.py, are its parts
def test_torchrun_restarts_a_run_whose_rank_was_killed(reference, tmp_path):
    run_dir = tmp_path / "run"
    # Whole before the third step begins.
    config = reference.config(run_dir, "checkpoint.async_save=false")
    due = partial(_has_reached, run_dir, 3)
    life = live_under_torchrun(config, tmp_path / "life", 2, RandomKill(0.0, 1), after=due)
    assert life.finished and not life.orphans and "exitcode: -9" in life.log, life.log[-3000:]
    assert "resumed from" in life.log
    assert first_difference(run_dir, reference.run_dir) == ""
