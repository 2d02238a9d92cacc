"""Real processes, not training: what is started, what isn't, what a failure leaves; nothing
outlives a stop.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.run_records import read_run
from megatron_gspo.tools.compare.study_plan import load_comparison, planned_runs, resolve
from megatron_gspo.tools.compare.study_runner import (
    Interrupted,
    StaleRun,
    execute,
    is_over,
    run_one,
)
from tests.support.waiting import wait_for
from tests.tools.compare.synthetic import write_comparison

# Stands where a run's process stands: writes a run directory of the resolved config, or fails, or
# waits.
PROGRAM = """
import json, sys, time
from pathlib import Path
folder, config, how = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
import yaml
(folder / "config.yaml").write_text(yaml.safe_dump(config))
(folder / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.25}\\n')
(folder / "started").open("a").write("x")
if how == "fail":
    print("run error: step 1: the gradient is not finite", file=sys.stderr)
    sys.exit(1)
if how == "wait":
    time.sleep(60)
(folder / "summary.json").write_text('{"exit": "finished"}')
"""


def command(how=lambda spec: "finish"):
    def make(comparison, spec):
        config = json.dumps(resolve(comparison, spec).dump())
        return [sys.executable, "-c", PROGRAM, str(spec.run_dir), config, how(spec)]

    return make


@pytest.fixture
def comparison(tmp_path):
    file = write_comparison(tmp_path, seeds=(1,), names=("grpo", "grpo_r2", "gspo"))
    return load_comparison(file)


def starts(spec):
    file = spec.run_dir / "started"
    return len(file.read_text()) if file.exists() else 0


def test_finished_and_failed_runs_are_not_started_again(comparison, capsys):
    specs = planned_runs(comparison)
    make = command(lambda spec: "fail" if spec.variant == "grpo" else "finish")
    execute(comparison, specs, slots=2, command=make)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["1/3", "2/3", "3/3"]
    assert any("gspo seed 1: finished, accuracy 25.0%, 0:0" in line for line in lines)
    assert any("grpo seed 1: failed, step 1: the gradient is not finite" in line for line in lines)
    failed = read_run(specs[0].run_dir, variant="grpo", seed=1)
    assert (failed.status, failed.message) == ("failed", "step 1: the gradient is not finite")

    execute(comparison, specs, slots=2, command=make)
    assert capsys.readouterr().err == ""
    assert [starts(spec) for spec in specs] == [1, 1, 1]

    execute(comparison, specs, slots=2, retry=True, command=command())
    assert [starts(spec) for spec in specs] == [2, 1, 1]
    assert read_run(specs[0].run_dir, variant="grpo", seed=1).status == "finished"


def test_a_run_that_was_killed_is_started_again(comparison):
    spec = planned_runs(comparison)[0]
    execute(comparison, [spec], slots=1, command=command())
    (spec.run_dir / "summary.json").unlink()
    assert not is_over(comparison, spec)
    execute(comparison, [spec], slots=1, command=command())
    assert starts(spec) == 2


def test_a_directory_of_other_settings_is_refused_before_anything_starts(comparison, tmp_path):
    specs = planned_runs(comparison)
    execute(comparison, specs[2:], slots=1, command=command())
    overrides = json.dumps({**comparison.config.overrides, "training.steps": 31})
    other = load_comparison(comparison.file, [f"overrides={overrides}"])
    with pytest.raises(
        StaleRun, match="was run with training.steps = 30, the comparison now has 31"
    ) as caught:
        execute(other, planned_runs(other), slots=1, command=command())
    assert "\n" not in str(caught.value)
    assert starts(specs[0]) == 0


def test_a_stop_ends_the_processes_and_leaves_no_failure(tmp_path):
    """In a process of its own, which gets the SIGTERM."""
    write_comparison(tmp_path, seeds=(1,), names=("grpo", "grpo_r2", "gspo"))
    script = textwrap.dedent(f"""
        from megatron_gspo.tools.compare.study_runner import Interrupted
        from tests.tools.compare.test_study_runner import *
        comparison = load_comparison({str(tmp_path / "compare.yaml")!r})
        try:
            execute(comparison, planned_runs(comparison), slots=2,
                    command=command(lambda spec: "wait"))
        except Interrupted as error:
            print(error)
            raise SystemExit(error.exit_code)
    """)
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    folder = tmp_path / "out" / "runs" / "base"
    wait_for(lambda: len(list(folder.glob("*/seed_1/started"))) == 2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command again to continue" in said
    assert not list(folder.glob("*/seed_1/failure.json"))
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in left


def test_a_signal_while_a_process_starts_ends_it_too(monkeypatch):
    """It arrives inside Popen, after the fork: raised there, it would leave a process without
    an owner.
    """
    real = subprocess.Popen
    started = []

    def start_and_stop(*arguments, **options):
        started.append(real(*arguments, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_and_stop)
    with pytest.raises(Interrupted):
        run_one([sys.executable, "-c", "import time; time.sleep(60)"])
    assert started[0].poll() == -signal.SIGTERM
