"""The lane without a GPU, its wheels, and what it would run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

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
    tests, benchmark = commands(["-x"])
    assert tests[-1] == "-x" and (ROOT / tests[3]).is_dir() and (ROOT / benchmark[1]).is_file()


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
    assert "--no-deps" in command and command[-len(names):] == needed()
