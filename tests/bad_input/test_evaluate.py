"""Arguments, task files and models that `megatron-gspo evaluate` refuses."""

from __future__ import annotations

import json

import pytest

from megatron_gspo.tools.evaluate.__main__ import main
from tests.support.command_line import ROWS, Case, check, in_fork, write_rows

TASK = ("MODEL", "--tasks", "task.jsonl")  # MODEL: the tiny model


def written(*rows, name="task.jsonl"):
    return lambda config, folder: write_rows(folder / name, rows)


def other_responses(config, folder):
    """Responses of an earlier evaluation with another seed."""
    path = folder / "out" / "responses" / "model" / "task.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"seed": 1}) + "\n")


LIVECODEBENCH = {"question_content": "a", "public_test_cases": "[]"}
CASES = (
    Case(
        "evaluation of nothing",
        "is no Hugging Face directory, run directory or server",
        ("absent", *TASK[1:]),
    ),
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
    Case(
        "two tasks of one name",
        "two files have the name 'task'",
        ("MODEL", "--tasks", "task.jsonl", "b/task.jsonl"),
        shows=("rename one",),
    ),
    Case(
        "task without its fields",
        "key 'prompt' is missing (found: text)",
        TASK,
        written({"text": "a"}),
    ),
    Case(
        "dates of a task without any",
        "has no date (contest_date)",
        (*TASK, "--from", "2024-01-01"),
        shows=("line 1", "leave out --from and --to"),
    ),
    Case(
        "no problem in the dates",
        "all rows are left out (1 outside of the dates)",
        (*TASK, "--from", "2024-01-01"),
        written({**ROWS[0], "contest_date": "2023-01-01"}),
        shows=("a wider window",),
    ),
    Case(
        "programs with too little time",
        "ends a verification before two programs at the time limit end",
        TASK,
        written(LIVECODEBENCH),
        shows=("set at least 39",),
    ),
    Case(
        "long prompt of a task",
        "but max_prompt_length is 2; raise it",
        (*TASK, "data.max_prompt_length=2"),
    ),
    Case(
        "responses of another evaluation",
        "give another --output, or delete the file",
        TASK,
        other_responses,
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
