"""Old code beside new: whether a loss that a comparison with a committed result shows is the code's or the machine's.

The committed result may come from another machine, and even on one machine ratios of several processes vary between
days. Benchmarks with a loss run again, in turns, from a checkout of the code that the committed result measured and
from today's. Only a loss that each of these pairs shows again is the code's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, say
from benchmarks.result_files import PARTIAL

Result = Mapping[str, Any]
OLD = ROOT / "build" / "benchmarks_base"  # the checkout


def revision_of(file: Path) -> str:
    """The commit that last changed ``file``: the code that a committed result measured.

    Raises ``ValueError`` where git knows no such commit.
    """
    log = ["git", "log", "-1", "--format=%H", "--", str(file)]
    done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise ValueError(f"{file}: no commit has it ({done.stderr.strip() or 'git log names none'}); give --revision")
    return done.stdout.strip()


@contextmanager
def checkout(revision: str, folder: Path = OLD) -> Iterator[Path]:
    """A worktree of ``revision`` in ``folder``, removed at the end. Raises ``ValueError`` where git refuses."""
    remove = ["git", "worktree", "remove", "--force", str(folder)]
    subprocess.run(remove, cwd=ROOT, capture_output=True, check=False)  # of a check that was killed
    subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
    add = ["git", "worktree", "add", "--quiet", "--detach", str(folder), revision]
    done = subprocess.run(add, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git worktree add {revision}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(remove, cwd=ROOT, check=True)


def run_from(root: Path, names: Sequence[str], peers_python: str) -> Result:
    """The partial result of the benchmarks ``names`` of the code in ``root``, with this interpreter.

    Raises ``ValueError`` where it wrote none.
    """
    results = root / "build" / "in_turns"
    command = [sys.executable, "benchmarks/run_all.py", "--only", *names, "--results", str(results)]
    env = {**os.environ, "PYTHONPATH": str(root)}  # before an editable installation of the project
    subprocess.run(
        [*command, "--peers-python", peers_python], cwd=root, env=env, stdout=subprocess.DEVNULL, check=False
    )
    try:
        return json.loads((results / PARTIAL).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{' '.join(command)} in {root} wrote no result: {error}") from None


def in_turns(roots: Mapping[str, Path], peers_python: str, number: int, names: Sequence[str]) -> tuple[Result, Result]:
    """Results of the "new" code and the "old", run from these folders. The order alternates with the pair's number, so
    that neither always runs on the warmer machine."""
    results = {}
    for code in ("new", "old") if number % 2 else ("old", "new"):
        say(f"-- pair {number + 1}, {code} code: {', '.join(names)}")
        results[code] = run_from(roots[code], names, peers_python)
    return results["new"], results["old"]
