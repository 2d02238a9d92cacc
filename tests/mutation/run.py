"""Mutation testing of megatron_gspo/algorithms and megatron_gspo/parallel.

    python tests/mutation/run.py [files or folders ...] [--slots 2] [--only survived] [--out build/mutation]

Each mutant is written into a copy of the project and the tests of its module run on it, quickest first, until one
fails. This process imports torch and the test tools once and forks for every mutant; the project itself is
imported in the fork, from the copy. Processes that a test starts import from the copy too, so a mutant is alive
in all ranks. Results are kept in OUT/results.jsonl, by file and mutant; a later run replaces what it looks at.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron_gspo/algorithms", "megatron_gspo/parallel")
COPIED = ("megatron_gspo", "tests", "patches", "tools", "pyproject.toml", "setup.py")
MEMORY = 12 * 2**30  # bytes of address space of one test run: a mutant of a tile size may allocate anything
STATUS = {0: "survived", 1: "killed", 2: "killed", 5: "no tests"}  # pytest's exit codes; 2: broken import

# What runs first on a mutant, after its module's own test: of the module, else of its package. Then everything.
FIRST = {
    "algorithms": ["test_worked_cases", "test_device"],
    "aggregation": ["test_worked_cases"],
    "importance_sampling": ["test_messages"],
    "metrics": ["test_worked_cases", "test_policy_loss", "test_robustness"],
    "objective": ["test_presets", "test_messages"],
    "objective_checks": ["test_messages"],
    "policy_loss": ["test_worked_cases", "test_device", "test_messages"],
    "presets": ["test_objective_checks", "test_messages"],
    "parallel": ["test_subgroups"],
    "log_probs": ["test_log_probs_limits"],
    "vocabulary_tiles": ["test_log_probs_limits", "test_log_probs"],
}
IGNORED = ["tests/algorithms/test_imports.py"]  # looks at imports alone, in a process of its own
EVERYTHING = {
    "algorithms": [
        "tests/algorithms",
        "tests/properties/test_objective.py",
        "tests/properties/test_rewards.py",
    ],
    "parallel": [
        "tests/parallel",
        "tests/properties/test_ownership.py",
        "tests/properties/test_log_probs.py",
    ],
}


def modules(paths: Iterable[str] = PACKAGES) -> list[str]:
    """The files that are mutated, of files and folders of the project."""
    found = [ROOT / path for path in paths]
    files = [file for path in found for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(ROOT)) for file in files if file.name != "__init__.py"]


def stages(file: str, root: Path = ROOT) -> list[list[str]]:
    """pytest's arguments for a mutant of `file`: its module's own tests, then the others."""
    package, module = Path(file).parts[-2], Path(file).stem
    names = [f"test_{module}", *FIRST.get(module, FIRST[package])]
    first = [path for name in names if (root / (path := f"tests/{package}/{name}.py")).exists()]
    others = [path for path in EVERYTHING[package] if (root / path).exists()]
    return [first, [*others, *(f"--ignore={path}" for path in (*first, *IGNORED))]]


@dataclass
class Job:
    file: str
    key: str
    source: str
    about: dict
    limit: float
    stage: int = 0
    again: bool = False  # a second try of what ran into its limit
    pid: int = 0
    started: float = 0.0


@dataclass
class Slot:
    """One copy of the project, in which one mutant at a time is tested."""

    folder: Path
    job: Job | None = None
    original: dict[str, str] = field(default_factory=dict)

    def begin(self, job: Job) -> None:
        path = self.folder / job.file
        self.original.setdefault(job.file, path.read_text())
        _put(path, job.source)
        job.started = time.monotonic()
        sys.stdout.flush()
        job.pid = os.fork()
        if job.pid == 0:
            _test(self.folder, job)
        self.job = job

    def end(self) -> Job:
        job, self.job = self.job, None
        assert job is not None
        _kill_group(job.pid)
        _put(self.folder / job.file, self.original[job.file])
        return job


def _put(path: Path, text: str) -> None:
    """Write a module; its compiled form would be trusted if only size and second of writing agreed."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _test(folder: Path, job: Job) -> None:
    """In the fork: run the job's stage in `folder`; the exit code is pytest's. Never returns."""
    code = 3
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent (Linux)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        log = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(folder)
        os.environ.update(PYTHONPATH=str(folder), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        sys.path[0] = str(folder)
        code = _stage(folder, job)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _stage(folder: Path, job: Job) -> int:
    import pytest

    try:
        module = importlib.import_module(job.file.removesuffix(".py").replace("/", "."))
    except Exception:
        traceback.print_exc()
        return 2
    assert str(module.__file__) == str(folder / job.file), f"{module.__file__} is not the mutated copy"
    import tests.support.distributed

    # Ranks are forks of this process, not of a server that starts with an import of torch.
    forks = mock.patch.object(tests.support.distributed, "fork_server", lambda: multiprocessing.get_context("fork"))
    # Many mutants leave a rank waiting for the others: ten seconds are enough for ranks that work.
    waits = mock.patch.dict(tests.support.distributed.run_distributed.__kwdefaults__, timeout=10.0)
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
    paths = stages(job.file, folder)[job.stage]
    with forks, waits:
        code = int(pytest.main([*options, "--hypothesis-profile=mutation", *paths]))
    with (folder / "modules.txt").open("a") as out:
        out.writelines(f"{name}\n" for name in sys.modules)
    return code


def import_what_tests_import(folder: Path) -> None:
    """Modules of other projects that the last passing run in `folder` had loaded, so that forks have them."""
    ours = {*COPIED, "__main__", "mutants", "conftest"}
    for name in sorted(set((folder / "modules.txt").read_text().split())):
        if name.partition(".")[0] not in ours:
            with contextlib.suppress(Exception):  # a lazy or made-up module: the fork will see to it
                importlib.import_module(name)


def run_all(jobs: list[Job], slots: list[Slot], record) -> None:
    """Run the jobs, one in each slot at a time; `record(job, status, seconds)` gets each outcome.

    First every mutant meets its module's own tests; those that live meet the other tests at the end. A run at
    its limit is tried once more with three times the limit: only what hangs then is a timeout.
    """
    waiting = list(reversed(jobs))
    while waiting or any(slot.job for slot in slots):
        for slot in slots:
            if slot.job is None and waiting:
                slot.begin(waiting.pop())
            job = slot.job
            if job is None:
                continue
            done, status = os.waitpid(job.pid, os.WNOHANG)
            seconds = time.monotonic() - job.started
            if not done and seconds < job.limit:
                continue
            slot.end()
            if not done:
                os.waitpid(job.pid, 0)
                if not job.again:
                    waiting.append(replace(job, limit=3 * job.limit, again=True))
                    continue
                record(job, "timeout", seconds)
            elif os.WIFSIGNALED(status):
                record(job, f"crashed with signal {os.WTERMSIG(status)}", seconds)
            elif os.WEXITSTATUS(status) == 0 and job.stage + 1 < len(stages(job.file)):
                waiting.insert(0, replace(job, stage=job.stage + 1))
            else:
                record(job, STATUS.get(os.WEXITSTATUS(status), "suspicious"), seconds)
        time.sleep(0.02)


def make_slot(folder: Path) -> Slot:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return Slot(folder)


def baseline(slots: list[Slot], files: list[str]) -> dict[str, float]:
    """Seconds that each package's tests take on the unchanged code; ends the run where they fail."""
    seconds: dict[str, float] = {}

    def record(job: Job, status: str, taken: float) -> None:
        if status != "survived":
            text = (slots[0].folder / "output.txt").read_text()
            raise SystemExit(f"{job.file}: tests of the unchanged code: {status}\n{text[-3000:]}")
        seconds[Path(job.file).parts[-2]] = taken

    for file in {Path(file).parts[-2]: file for file in files}.values():
        run_all([Job(file, "", (ROOT / file).read_text(), {}, 900.0)], slots[:1], record)
        import_what_tests_import(slots[0].folder)
    print(f"seconds that the unchanged code takes: {seconds}", flush=True)
    return seconds


def load(store: Path) -> dict[str, dict[str, dict]]:
    """Results by file and key; of several lines about one mutant the last counts."""
    results: dict[str, dict[str, dict]] = {}
    for line in store.read_text().splitlines() if store.is_file() else []:
        about = json.loads(line)
        results.setdefault(about["file"], {})[about["key"]] = about
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=PACKAGES)
    parser.add_argument("--slots", type=int, default=2, help="mutants tested at a time")
    parser.add_argument("--only", help="only mutants with this status in the last results, and new ones")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutation")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.out = options.out.resolve()
    sys.path.insert(1, str(Path(__file__).parent))
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401  imported here so that every fork has them already
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed  # noqa: F401
    import torch.profiler  # noqa: F401
    from mutants import mutants

    torch.set_num_threads(1)
    files = modules(options.paths)
    slots = [make_slot(options.out / f"slot{i}") for i in range(options.slots)]
    store = options.out / "results.jsonl"
    results = load(store)
    unchanged = baseline(slots, files)
    gc.freeze()
    kept, jobs = [], []
    for file in files:
        old = results.pop(file, {})
        for mutant in mutants((ROOT / file).read_text()):
            about = {"file": file, "key": mutant.key, "line": mutant.line, "operator": mutant.operator}
            about |= {"before": mutant.before, "after": mutant.after}
            status = old.get(mutant.key, {}).get("status", "not run")
            if options.only and status not in ("not run", options.only):
                kept.append(old[mutant.key] | about)
                continue
            kept.append(about | {"status": "not run"})
            limit = 30.0 + 5 * unchanged[Path(file).parts[-2]]
            jobs.append(Job(file, mutant.key, mutant.source, about, limit))
    kept = [about for known in results.values() for about in known.values()] + kept
    store.write_text("".join(json.dumps(about) + "\n" for about in kept))
    print(f"{len(jobs)} mutants", flush=True)

    def record(job: Job, status: str, seconds: float) -> None:
        with store.open("a") as out:
            out.write(json.dumps(job.about | {"status": status, "seconds": round(seconds, 2)}) + "\n")
        if status != "killed":
            about = job.about
            print(f"{job.file}:{about['line']} {job.key} {status} {seconds:.0f} s {about['operator']}")
            print(f"    - {about['before']}\n    + {about['after']}", flush=True)

    run_all(jobs, slots, record)


if __name__ == "__main__":
    main()
