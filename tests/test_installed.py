"""The console command from an installed wheel, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_gspo import cli

ROOT = Path(__file__).parents[1]
LIMIT = 600.0  # seconds for one command on a busy machine


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the installed wheel.

    Built from a copy, since setuptools writes build/ into the source.
    """
    folder = tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    tops = {
        "megatron_gspo",
        "patches",
        "tools",
        "examples",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    for name in names:
        if name.partition("/")[0] in tops and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
            (folder / "source" / name).chmod((ROOT / name).stat().st_mode)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run(
        [
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            folder,
            folder / "source",
        ],
        check=True,
        cwd=folder,
    )
    [wheel] = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-compile", "--target", folder / "site", wheel],
        check=True,
    )
    with zipfile.ZipFile(wheel) as content:
        assert not [
            name
            for name in content.namelist()
            if name.startswith(("tests/", "docs/", "benchmarks/"))
        ]
    return folder / "site"


def environment(site: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    }
    return {**kept, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def run_installed(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed console script."""
    command = [sys.executable, str(site / "bin" / "megatron-gspo"), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(site), capture_output=True, text=True, timeout=LIMIT
    )


@pytest.fixture(scope="module")
def workplace(installed, tmp_path_factory) -> Path:
    """An empty directory after `megatron-gspo examples`."""
    cwd = tmp_path_factory.mktemp("empty")
    done = run_installed(installed, cwd, "examples")
    assert done.returncode == 0, done.stderr
    return cwd


def test_the_installed_package_is_what_runs(installed, tmp_path):
    code = (
        "import megatron_gspo, megatron_gspo.tools; print(megatron_gspo.__path__,"
        " megatron_gspo.tools.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        done.stdout.strip()
        == f"['{installed}/megatron_gspo'] {installed}/megatron_gspo/tools/__init__.py"
    )


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_installed_help_shows_an_example(name, installed, tmp_path):
    done = run_installed(installed, tmp_path, name, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(rf"example: +megatron-gspo {name}\b", " ".join(done.stdout.split()))
    assert not list(tmp_path.iterdir())


def test_installed_examples_are_those_of_the_checkout(workplace):
    shipped = ROOT / "examples"
    copied = {
        file.relative_to(workplace / "examples") for file in workplace.rglob("*") if file.is_file()
    }
    assert copied == {
        file.relative_to(shipped)
        for file in shipped.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert os.access(workplace / "examples" / "launch" / "node.sh", os.X_OK)


def test_installed_plan(workplace, installed):
    model = "examples/qwen3_moe/models/Qwen3-30B-A3B"
    options = [
        "--gpus",
        "8",
        "--gpu",
        "h200",
        "--response-length",
        "8192",
        "--layout",
        "TP1 EP8",
        "--coarse",
    ]
    done = run_installed(installed, workplace, "plan", "--model", model, *options)
    assert done.returncode == 0, done.stderr
    assert "EP8" in done.stdout


def test_installed_rehearse(workplace, installed):
    done = run_installed(
        installed,
        workplace,
        "rehearse",
        "examples/qwen3_moe/qwen3_30b_a3b_1x8_141gb_gspo.yaml",
        "model.init=random",
        "model.path=examples/qwen3_moe/models/Qwen3-30B-A3B",
        f"sglang.python={sys.executable}",
        "data.prompts=/dev/null",
        "data.eval_prompts=/dev/null",
        "--world",
        "8",
        "--build-only",
    )
    assert done.returncode == 0, done.stderr
    assert "stage" in done.stdout


@pytest.mark.slow
def test_installed_demo_runs_to_its_end(installed, tmp_path):
    short = ("training.steps=2", "optimizer.lr_warmup_steps=0")
    done = run_installed(installed, tmp_path, "demo", "--processes", "2", *short)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout
    assert (tmp_path / "runs/demo/gspo/hf/config.json").is_file()
