"""The page of mutation testing: written of the whole alone, and every survivor has a reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.report import ROOT, unmeasured

pytest.importorskip("mutmut", reason="the dev extra is not installed")

FILES = unmeasured({})  # all of them


def report(folder: Path, statuses: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Report of files that have 40 killed mutants each and one with a status."""
    rows = [
        {"file": file, "key": f"{file}/{number}", "line": number, "before": "a = 1", "after": "a = 2"}
        | {"status": status if number == 0 else "killed"}
        for file, status in statuses.items() for number in range(41)
    ]  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "tests/mutation/report.py", "--out", folder, "--page", folder / "page.md"]
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("status, code", [("killed", 0), ("survived", 1)])
def test_one_module_writes_no_page_and_fails_for_its_own_survivor_alone(tmp_path, status, code):
    done = report(tmp_path, {FILES[0]: status})
    assert done.returncode == code, done.stdout + done.stderr
    assert not (tmp_path / "page.md").exists() and "is not written" in done.stdout
    assert ("no reason in survivors.toml" in done.stdout) == (status == "survived")
    assert "does not survive" not in done.stdout


def test_an_unfinished_file_writes_no_page(tmp_path):
    done = report(tmp_path, {file: "not run" if file == FILES[-1] else "killed" for file in FILES})
    assert done.returncode == 0 and "1 files are not measured" in done.stdout and "unfinished" in done.stdout
    assert not (tmp_path / "page.md").exists()


def test_the_whole_writes_a_page_and_wants_no_reason_without_a_survivor(tmp_path):
    done = report(tmp_path, {file: "survived" if file == FILES[0] else "killed" for file in FILES})
    page = (tmp_path / "page.md").read_text()
    assert done.returncode == 1 and "does not survive" in done.stdout
    assert f"of {41 * len(FILES)} mutants" in page and "Without a reason" in page
    assert "| 41 | 1 | 97.6 |" in page
