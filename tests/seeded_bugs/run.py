"""Insert known bugs into a copy of the project, one at a time: a test must fail for each.

    python -m tests.seeded_bugs.run [words of a name ...] [--slots 2]

First the tests must pass on the unchanged copy. Then each bug (all_bugs.py) is written into a copy,
and its test must fail with an assertion: a crash, an import that fails or a timeout does not count.
The exit code is 1 if a bug survives.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.seeded_bugs.all_bugs import SEEDED_BUGS
from tests.seeded_bugs.seeded_bug import SeededBug
from tests.seeded_bugs.warm_pytest import OUTPUT

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "megatron_gspo",
    "patches",
    "tools",
    "benchmarks",
    "tests",
    "examples",
    "setup.py",
    "pyproject.toml",
)
SECONDS = 300  # of a test with a bug
SECONDS_OF_ALL = 3600  # of all tests without one
# An assertion in pytest's output: of the test itself, or in what it shows of another process.
ASSERTION = re.compile(
    r"^(E   assert |[E |+-]*(AssertionError|(_pytest\.outcomes\.)?Failed: DID NOT RAISE)).*",
    re.MULTILINE,
)


class ProjectCopy:
    """A copy of the project's sources, and a process that runs its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        # Before an editable installation of the project the interpreter looks at PYTHONPATH.
        self.pytest = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.seeded_bugs.warm_pytest"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], seconds: int) -> tuple[int, str]:
        """pytest's exit code, negative for a timeout, and its output."""
        self.pytest.stdin.write(json.dumps([seconds, *tests]) + "\n")
        self.pytest.stdin.flush()
        code = int(self.pytest.stdout.readline())
        return code, (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace")

    def catches(self, bug: SeededBug) -> bool:
        """Whether the bug's test fails with an assertion. Prints what happened."""
        begin = time.monotonic()
        file = self.folder / bug.file
        source = file.read_text(encoding="utf-8")
        file.write_text(bug.apply(source), encoding="utf-8")
        try:
            code, output = self.run([bug.test], SECONDS)
        finally:
            file.write_text(source, encoding="utf-8")
        assertion = ASSERTION.search(output) if code == 1 else None
        seconds = time.monotonic() - begin
        if assertion:
            print(
                f"caught   {bug.name} ({seconds:.0f} s): {assertion[0].strip()[:120]}", flush=True
            )
        else:
            print(
                f"SURVIVED {bug.name} ({seconds:.0f} s), pytest {code}:"
                f" {bug.test}\n{output[-2000:]}",
                flush=True,
            )
        return assertion is not None


def check_baseline(copies: Sequence[ProjectCopy], tests: Sequence[str]) -> None:
    """Raises ``SystemExit`` unless the tests pass without a bug."""
    # Without a test pytest would run all.
    copies = copies[: len(tests)]
    shares = [tests[number :: len(copies)] for number in range(len(copies))]
    with ThreadPoolExecutor(len(copies)) as pool:
        results = list(
            pool.map(lambda copy, share: copy.run(share, SECONDS_OF_ALL), copies, shares)
        )
    for code, output in results:
        if code != 0:
            raise SystemExit(
                f"without a bug pytest ends with {code}; fix that first:\n{output[-2000:]}"
            )


def catch_all(bugs: Sequence[SeededBug], copies: Sequence[ProjectCopy]) -> int:
    """How many bugs are caught; as many are tried at a time as there are copies."""
    free: queue.Queue[ProjectCopy] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def catch(bug: SeededBug) -> bool:
        copy = free.get()
        try:
            return copy.catches(bug)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        return sum(pool.map(catch, bugs))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="only bugs whose name or file has one of these words"
    )
    parser.add_argument(
        "--slots", type=int, default=2, help="bugs at a time (default: %(default)s)"
    )
    args = parser.parse_args()
    bugs = [
        bug
        for bug in SEEDED_BUGS
        if any(word in f"{bug.name} {bug.file}" for word in args.words or [""])
    ]
    if not bugs:
        parser.error(
            f"{' '.join(args.words)}: in no bug's name or file; the bugs are in tests/seeded_bugs"
        )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seeded_bugs_") as folder:
        copies = [
            ProjectCopy(Path(folder).resolve() / f"copy_{slot}") for slot in range(args.slots)
        ]
        check_baseline(copies, sorted({bug.test for bug in bugs}))
        print(f"without a bug all chosen tests pass ({time.monotonic() - begin:.0f} s)", flush=True)
        caught = catch_all(bugs, copies)
        for copy in copies:
            copy.pytest.kill()
            copy.pytest.wait()
    print(f"{caught} of {len(bugs)} bugs caught in {time.monotonic() - begin:.0f} s")
    return 0 if caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
