"""The diff on the page about extending applies to the library, and its own test passes then."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_diff_of_a_surrogate_is_all_that_one_needs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    [diff] = re.findall(r"^```diff\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    shutil.copytree(
        ROOT / "megatron_gspo",
        tmp_path / "megatron_gspo",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    changed = re.findall(r"^\+\+\+ b/(.+)$", diff, flags=re.MULTILINE)
    [test] = [name for name in changed if name.startswith("tests/")]
    assert len(changed) == 3
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
