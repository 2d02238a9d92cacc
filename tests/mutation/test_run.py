"""The mutation run: what a mutant is, that every rank imports it, and what counts as killed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="the dev extra is not installed")

from tests.mutation.mutants import mutants  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCE = '''"""Module."""

__all__ = ["f"]
T = TypeVar("T")
Alias: TypeAlias = tuple[int]
LIMIT = 0.5


@decorated
def f(x: "int", scale: float = 2.0) -> "int":
    """Doc."""
    return x * scale if len(x) < 3 else -x


def g(x, y):
    return zip(x, 2, strict=True)
'''


def test_tables_defaults_and_decorated_bodies_are_mutated_but_not_what_nothing_reads():
    found = {(m.operator, m.after) for m in mutants(SOURCE)}
    assert found == {
        ("number", "LIMIT = 1.5"),
        ("assignment", "LIMIT = None"),
        ("remove_decorator", ""),
        ("number", 'def f(x: "int", scale: float = 3.0) -> "int":'),
        ("swap_op", "return x / scale if len(x) < 3 else -x"),
        ("swap_op", "return x * scale if len(x) <= 3 else -x"),
        ("swap_op", "return x * scale if len(x) < 3 else +x"),
        ("number", "return x * scale if len(x) < 4 else -x"),
        ("if_exp", "return x * scale if (len(x) < 3) and False else -x"),
        ("if_exp", "return x * scale if (len(x) < 3) or True else -x"),
        ("number", "return zip(x, 3, strict=True)"),
    }
    for mutant in mutants(SOURCE):
        compile(mutant.source, "mutant", "exec")


def test_a_key_outlives_a_moved_line_and_tells_equal_changes_apart():
    twice = "a = f(1)\nb = f(1)\n"
    keys = [m.key for m in mutants(twice)]
    assert len(set(keys)) == len(keys) > 4
    assert [m.key for m in mutants("\n\n" + twice)] == keys


def outcomes(script: str, folder: Path) -> str:
    """What `script` prints, run beside run.py with a copy of the project in `slot`."""
    lines = [
        "import sys, torch, run",
        "from pathlib import Path",
        f"slot = run.make_slot(Path({str(folder)!r}))",
    ]
    lines += ["record = lambda job, status, seconds: print(status, flush=True)", script]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT / "tests" / "mutation",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_mutant_is_alive_in_the_processes_that_tests_start(tmp_path):
    """Deadly where there are several ranks, harmless in the process that runs the tests."""
    script = """
file = "megatron_gspo/parallel/collectives.py"
source = (run.ROOT / file).read_text()
branch = "    gathered = x.new_empty("
assert source.count(branch) == 1
deadly = source.replace(branch, "    raise SystemError('reached in a rank')\\n" + branch)
run.run_all([run.Job(file, "", deadly, {}, 100.0)], [slot], record)
"""
    assert outcomes(script, tmp_path / "slot") == "killed\n"
    output = (tmp_path / "slot" / "output.txt").read_text()
    assert "failed first" in output and "SystemError: reached in a rank" in output
    assert "test_no_group_is_one_process" not in output  # that one passed, in its own process


@pytest.mark.slow
def test_only_what_hangs_twice_is_a_timeout(tmp_path):
    script = """
file = "megatron_gspo/algorithms/kl.py"
source = (run.ROOT / file).read_text()
hangs = "while True:\\n    pass\\n"
dies = "import os, signal\\nos.kill(os.getpid(), signal.SIGSEGV)\\n"
jobs = [run.Job(file, "", text, {}, 100.0) for text in (hangs, dies, "raise ValueError", source)]
jobs[0].limit = 2.0
run.stages = lambda file, root=None: [["tests/algorithms/test_kl.py"], ["tests/algorithms/test_imports.py"]]
run.run_all(jobs, [slot], record)
assert (slot.folder / file).read_text() == source
"""
    printed = outcomes(script, tmp_path / "slot").split("\n")
    assert sorted(printed) == sorted(["crashed with signal 11", "killed", "survived", "timeout", ""])
