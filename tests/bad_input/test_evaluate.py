"""Arguments, task files and models that `megatron-gspo evaluate` refuses."""

from __future__ import annotations

import pytest

from megatron_gspo.tools.evaluate.__main__ import main
from tests.support.command_line import ROWS, Case, check, in_fork, write_rows

TASK = ("MODEL", "--tasks", "task.jsonl")  # MODEL: the tiny model


CASES = (
    Case(
        "evaluation without a task",
        "--tasks: names no file",
        ("MODEL",),
        shows=("give --tasks FILE",),
    ),
    Case(
        "evaluated URL with a password",
        "give http://host:port, without user, path or query",
        ("http://user:secret@a:1", *TASK[1:]),
    ),
    Case(
        "evaluated servers without a tokenizer",
        "servers do not send their tokenizer",
        ("http://a:1", *TASK[1:]),
        shows=("give model.path=DIR",),
    ),
    Case(
        "steps of a model directory",
        "is no run directory",
        (*TASK, "--steps", "all"),
        shows=("leave --steps out",),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluation(case, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    write_rows(tmp_path / "task.jsonl", ROWS)
    if case.breaks:
        case.breaks({}, tmp_path)
    arguments = ["model" if each == "MODEL" else each for each in case.overrides]
    check(case, in_fork(lambda: main([*arguments, "--output", "out"])))
