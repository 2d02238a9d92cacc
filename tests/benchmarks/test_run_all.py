"""`run_all.py`: every benchmark runs, also after a failure of another; the contents of a result."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time

import pytest

from benchmarks import run_all as frame
from benchmarks.report import as_text, rows_of
from tests.support.benchmark_results import row

WRITE = """
import json, sys
json.dump({content}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""
ARGUMENTS = argparse.Namespace(only=None, quick=False, peers_python=None)


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    """Three benchmarks of a few lines, in ``tmp_path``; the second fails and the third doesn't exist."""
    content = {"rows": [row("x", 1.5, benchmark="any", target=1.0, note="why").to_json()],
               "peer_versions": {"verl": "1"}, "not_compared": {"liger": "needs a GPU"}}  # fmt: skip
    (tmp_path / "good.py").write_text(WRITE.format(content=json.loads(json.dumps(content))))
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(frame, "BENCHMARKS", ("bad", "absent", "good"))
    monkeypatch.setattr(frame, "command_of", lambda file, **more: ["python", str(file)])
    return tmp_path


def test_a_benchmark_that_fails_leaves_the_others_be(benchmarks, capfd):
    result = frame.run_all(ARGUMENTS, benchmarks)
    assert result["failures"] == {"bad": "exit code 3", "absent": "there is no absent.py"}
    assert result["partial"] is True
    assert [found.key for found in rows_of(result)] == [("good", "x", "peer")]
    assert result["not_compared"] == {"good": {"liger": "needs a GPU"}} and result["peer_versions"] == {"verl": "1"}
    assert list(result["commands"]) == ["bad", "absent", "good"] and list(result["benchmark_seconds"]) == ["good"]
    progress = capfd.readouterr().err
    assert re.search(r"== good \(3 of 3\), \d:\d\d elapsed, about \d", progress)
    assert "FAILED bad: exit code 3" in progress
    text = as_text(result)
    assert "- good: x, against peer: 1.5 for <= 1, 50 % off (why)" in text
    assert "- good: liger: needs a GPU" in text and "- bad: exit code 3" in text


def test_a_whole_run_is_whole_and_an_only_is_not(benchmarks):
    assert frame.run_all(argparse.Namespace(only=["good"], quick=False, peers_python=None), benchmarks)["partial"]
    frame.BENCHMARKS = ("good",)
    assert frame.run_all(ARGUMENTS, benchmarks)["partial"] is False


def test_a_benchmark_that_hangs_ends_with_its_children(tmp_path):
    child = tmp_path / "child"
    program = tmp_path / "hang.py"
    program.write_text(f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(child.pid))
time.sleep(60)
""")
    with pytest.raises(RuntimeError, match="took longer than 1 s"):
        frame.run_benchmark([sys.executable, str(program)], tmp_path / "none", 1.0)
    for _ in range(100):
        try:
            os.kill(int(child.read_text()), 0)
        except ProcessLookupError:
            return
        if open(f"/proc/{child.read_text()}/stat").read().split()[2] == "Z":
            return  # killed; its new parent hasn't reaped it yet
        time.sleep(0.05)
    pytest.fail("the child lives")


def test_commands_name_the_peers_interpreter_only_where_it_is_used(tmp_path):
    command = frame.command_of(tmp_path / "loop_vs_trl.py", quick=True, peers_python="/p")
    assert command == ["python", "benchmarks/loop_vs_trl.py", "--quick", "--peers-python", "/p"]
    command = frame.command_of(tmp_path / "step_vs_megatron.py", quick=False, peers_python="/p")
    assert command == ["python", "benchmarks/step_vs_megatron.py"]


def test_expected_times_are_those_of_the_last_run(tmp_path):
    (tmp_path / "latest.json").write_text(json.dumps({"result": "machine.json"}))
    (tmp_path / "machine.json").write_text(json.dumps({"benchmark_seconds": {"a": 100.0, "b": 60.0}}))
    last = frame.seconds_of_last_run(tmp_path)
    assert frame.expected_seconds(["a", "b", "c"], last, quick=False) == {"a": 100.0, "b": 60.0, "c": 80.0}
    assert frame.expected_seconds(["a"], last, quick=True) == {"a": 15.0}
    assert frame.seconds_of_last_run(tmp_path / "none") == {}
    assert frame.clock(247.4) == "4:07" and frame.clock(3600) == "60:00"


def test_reasons_may_be_a_mapping_or_sentences():
    assert frame.named_reasons(["liger: needs triton"]) == frame.named_reasons({"liger": "needs triton"})


def test_rows_that_mislead_are_a_failure():
    good = [row("a").to_json(), row("b").to_json()]
    assert [found["benchmark"] for found in frame.checked_rows(good, "name")] == ["name", "name"]
    with pytest.raises(ValueError, match="two rows are called a, against peer"):
        frame.checked_rows([*good, row("a", 2.0).to_json()], "name")
    with pytest.raises(ValueError, match="a, against peer: a figure isn't finite"):
        frame.checked_rows([row("a", float("inf")).to_json()], "name")
    with pytest.raises(ValueError, match="not a row"):
        frame.checked_rows([{"name": "a"}], "name")
