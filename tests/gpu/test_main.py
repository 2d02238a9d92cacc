"""The lane without a GPU, its wheels, and what it would run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.gpu import __main__ as lane
from tests.gpu.__main__ import ROOT, commands, install, reason_to_skip
from tests.gpu.wheels import OWN, closure, download_command, needed

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
def test_without_a_gpu_the_lane_says_so_and_succeeds():
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("make gpu: skipped: no CUDA GPU")


@without_gpu
def test_a_gpu_that_torch_cannot_use_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit, match="not a CUDA build"):
        reason_to_skip(tmp_path)
    assert "no CUDA GPU" in str(reason_to_skip(tmp_path / "other"))


def test_the_lane_runs_files_that_exist():
    steps = commands(["-x"])
    assert list(steps) == ["tests", "config", "rehearsal", "benchmark"]
    assert steps["tests"][-1] == "-x" and (ROOT / steps["tests"][3]).is_dir()
    assert steps["config"][1] == steps["benchmark"][1] and (ROOT / steps["config"][1]).is_file()
    assert steps["rehearsal"][4] == f"{steps['config'][-1]}/config.yaml"
    assert steps["rehearsal"][-1] == steps["benchmark"][-1]


def test_a_step_that_fails_is_named_and_the_others_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lane, "REHEARSED", tmp_path / "rehearsed.json")
    python = [sys.executable, "-c"]
    wrote = f"open({str(tmp_path / 'ran')!r}, 'a').write(repr(sys.argv[1:]))"
    steps = {"tests": [*python, "raise SystemExit(1)"], "rehearsal": [*python, "1 / 0"],
             "benchmark": [*python, f"import sys; {wrote}", "--rehearsed", "file"]}  # fmt: skip
    assert lane.run(steps) == ["tests", "rehearsal"]
    steps["rehearsal"] = [*python, f"open({str(lane.REHEARSED)!r}, 'w')"]
    assert lane.run(steps) == ["tests"]
    assert (tmp_path / "ran").read_text() == "[]['--rehearsed', 'file']"


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no wheels there"):
        install(tmp_path)


@without_gpu  # there the checkout need not be installed
def test_wheels_are_all_that_setup_requires_but_torch_and_numpy():
    names = {item.partition("==")[0] for item in needed()}
    text = (ROOT / "setup.py").read_text().partition("install_requires=[")[2].partition("]")[0]
    required = {name.lower().replace("_", "-") for name in re.findall(r'"([\w-]+)>=', text)}
    assert len(required) > 10 and required - {*OWN} <= names
    assert {"pytest", "hypothesis", "pydantic-core"} <= names
    assert not names & closure(OWN) and not [name for name in names if name.startswith("nvidia")]
    command = download_command("wheels")
    assert "--no-deps" in command and command[-len(names) :] == needed()
