"""Insert known bugs into a copy of the project, one at a time: a test must fail for each.

    python -m tests.seeded_bugs.run [words of a name ...] [--slots 2] [--markdown FILE]

First the chosen tests must pass on the unchanged copy. Then each bug (all_bugs.py) is written into a copy, its tests
run, and one of them must fail with an assertion: a crash, an import that fails or a timeout doesn't count. Prints what
caught which; exit code 1 if a bug survives.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.seeded_bugs.all_bugs import SEEDED_BUGS
from tests.seeded_bugs.seeded_bug import SeededBug

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("megatron_gspo", "patches", "tools", "benchmarks", "tests", "examples", "setup.py", "pyproject.toml")
LIMIT = 300.0  # seconds of pytest with a bug
LIMIT_OF_ALL = 1800.0  # the same, of all tests without one
ASSERTED = ("assert ", "AssertionError", "Failed: DID NOT RAISE")  # how pytest's message of a failed assertion begins
RAISED = re.compile(r"AssertionError(:|$)|(_pytest\.outcomes\.)?Failed: DID NOT RAISE")
DECORATION = re.compile(r"^(E\s)?[\s|+-]*")  # of pytest, and of hypothesis' groups of exceptions
WHERE_FROM = """
import importlib.util, sys
for name in sys.argv[1:]:
    print(importlib.util.find_spec(name).origin)
"""


@dataclass(frozen=True)
class Outcome:
    """Of one bug: `caught_by` a test, at the `line` that failed; or "" and in `line` what happened instead."""

    bug: SeededBug
    caught_by: str
    line: str
    seconds: float


def copy_project(folder: Path) -> Path:
    """A copy of the sources and tests, on which nothing else works."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def environment(copy: Path) -> dict[str, str]:
    """This process's, with the copy first on the path: before an editable installation of the project."""
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def check_imports(copy: Path, files: Iterable[str]) -> None:
    """Raises ``RuntimeError`` if Python imports any of `files` from elsewhere than the copy.

    The modules are found, not run: some can be imported in a server's environment alone.
    """
    modules = {}
    for file in files:
        name = file.removesuffix(".py").replace("/", ".")
        modules[f"megatron_gspo.{name}" if name.startswith(("patches.", "tools.")) else name] = file
    command = [sys.executable, "-c", WHERE_FROM, *modules]
    done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=True)
    for found, file in zip(done.stdout.split("\n"), modules.values(), strict=False):
        if Path(found) != copy / file:
            raise RuntimeError(f"{file} is imported from {found}, not the copy {copy}: the result would be meaningless")


def run_tests(copy: Path, tests: Sequence[str], *options: str,
              limit: float = LIMIT) -> tuple[int, list[ElementTree.Element]]:  # fmt: skip
    """pytest's exit code (-1: it took ``limit`` seconds) and its report of each test; no tests are no failure."""
    if not tests:
        return 0, []
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, *tests]
    process = subprocess.Popen(
        command, cwd=copy, env=environment(copy), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return -1, []
    if not report.is_file():
        raise RuntimeError(f"pytest wrote no report:\n{output[-2000:]}")
    return process.returncode, list(ElementTree.parse(report).iter("testcase"))


def assertion_of(case: ElementTree.Element) -> str:
    """The failing assertion of one test, or of one of its fixtures, in one line; "" if there is none."""
    failures = [*case.findall("failure"), *case.findall("error")]
    for failure in failures:
        message = failure.get("message", "").strip()
        if message.startswith(ASSERTED):
            return message.split("\n")[0]
        # In another process or in a group of hypothesis': what was raised stands in the text. An `assert` there may
        # be the source of a line that raised something else.
        source = ""
        for line in (DECORATION.sub("", line) for line in (failure.text or "").splitlines()):
            if RAISED.match(line):
                return source if line == "AssertionError" and source else line
            source = line if line.startswith("assert ") else source
    return ""


def try_bug(bug: SeededBug, copy: Path) -> Outcome:
    """Write the bug into the copy, run its tests until one fails, take it out again."""
    begin = time.monotonic()
    file = copy / bug.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(bug.before, bug.after), encoding="utf-8")
    try:
        code, cases = run_tests(copy, bug.tests, "-x")
    finally:
        file.write_text(whole, encoding="utf-8")
    seconds = time.monotonic() - begin
    for case in cases:
        if code == 1 and (line := assertion_of(case)):
            module = case.get("classname", "").replace(".", "/")
            return Outcome(bug, f"{module}.py::{case.get('name')}", line, seconds)
    happened = "timeout" if code < 0 else "all tests pass" if code == 0 else f"no assertion failed (pytest: {code})"
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error")):
            happened = f"{case.get('name')}: {problem.get('message')}"
    return Outcome(bug, "", happened.split("\n")[0], seconds)


def try_all(bugs: Sequence[SeededBug], copies: Sequence[Path]) -> list[Outcome]:
    """Each bug in a copy that is free; as many at a time as there are copies."""
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def one(bug: SeededBug) -> Outcome:
        copy = free.get()
        try:
            outcome = try_bug(bug, copy)
        finally:
            free.put(copy)
        print(f"{'caught  ' if outcome.caught_by else 'SURVIVED'} {bug.name}: {outcome.line[:160]}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(one, bugs))


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: one row a bug."""
    rows = ["| bug | seen in | caught by | seconds |", "| --- | --- | --- | ---: |"]
    for o in outcomes:
        caught = f"`{o.caught_by.removeprefix('tests/')}`" if o.caught_by else f"**nothing**: {o.line}"
        name = o.bug.name.replace("|", "\\|")
        rows.append(f"| {name} | {o.bug.seen_in} | {caught} | {o.seconds:.0f} |")
    return "\n".join(rows)


def check_baseline(copies: Sequence[Path], tests: Sequence[str]) -> None:
    """Raises ``SystemExit`` unless the tests pass without a bug."""
    files = sorted({test.partition("::")[0] for test in tests})
    parts = [[t for t in tests if files.index(t.partition("::")[0]) % len(copies) == i] for i in range(len(copies))]
    with ThreadPoolExecutor(len(copies)) as pool:
        runs = list(pool.map(partial(run_tests, limit=LIMIT_OF_ALL), copies, parts))
    for code, cases in runs:
        bad = [case.get("name") for case in cases if any(case.findall(tag) for tag in ("failure", "error", "skipped"))]
        if code or bad:
            raise SystemExit(f"without any bug pytest exits with {code}; failed or skipped: {bad}. Fix that first")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs whose name has one of these words")
    parser.add_argument("--slots", type=int, default=2, help="bugs at a time (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    bugs = [d for d in SEEDED_BUGS if not args.words or any(word in d.name for word in args.words)]
    if not bugs:
        parser.error(f"{' '.join(args.words)}: in no bug's name; the names are in tests/seeded_bugs")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seeded_bugs_") as name:
        copies = [copy_project(Path(name).resolve() / f"copy_{slot}") for slot in range(args.slots)]
        for copy in copies:
            check_imports(copy, sorted({bug.file for bug in bugs}))
        check_baseline(copies, sorted({test for bug in bugs for test in bug.tests}))
        print(f"without a bug all chosen tests pass ({time.monotonic() - begin:.0f} s)", flush=True)
        outcomes = try_all(bugs, copies)
    survivors = [o for o in outcomes if not o.caught_by]
    print("", table(outcomes), "", sep="\n")
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} bugs caught in {time.monotonic() - begin:.0f} s")
    if args.markdown:
        args.markdown.write_text(table(outcomes) + "\n", encoding="utf-8")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
