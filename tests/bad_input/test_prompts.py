"""Prompt files that are empty, damaged, or don't fit the model and the batch; and what is
dropped and counted.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.command_line import ROWS, Case, check, small_config, start, write_rows


def rows(*content):
    return lambda config, folder: write_rows(folder / "prompts.jsonl", content)


def text(content):
    def write(config, folder):
        data = content if isinstance(content, bytes) else content.encode()
        (folder / "prompts.jsonl").write_bytes(data)

    return write


def named(name, content=b""):
    """Another prompt file."""

    def write(config, folder):
        (folder / name).write_bytes(content)
        config["data"]["prompts"] = str(folder / name)

    return write


def directory(config, folder):
    (folder / "data").mkdir()
    config["data"]["prompts"] = str(folder / "data")


def folder(*names, split=""):
    """A folder with a file of one row for each name."""

    def write(config, folder):
        for name in names:
            (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            write_rows(folder / "data" / name, ROWS[:1])
        config["data"]["prompts"] = f"{folder}/data{split}"

    return write


ENDED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no user') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat(messages):
    """A row of messages, and a model with a chat template."""

    def write(config, folder):
        model = shutil.copytree(config["model"]["path"], folder / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        config["model"]["path"] = str(model)
        write_rows(folder / "prompts.jsonl", [{"prompt": messages, "answer": "b"}])

    return write


CASES = (
    Case(
        "prompt file missing",
        "no such file; give a path relative to the working directory",
        ("data.prompts=absent.jsonl",),
        shows=("data.prompts = ", "absent.jsonl"),
    ),
    Case("compressed file", "unknown kind '.zip'", breaks=named("prompts.zip", b"PK")),
    Case("empty list of files", "names no file; name one, or set it to null", ("data.prompts=[]",)),
    Case(
        "two system messages",
        "both give the system message; set one of them",
        ("data.chat_template=true", "data.system_prompt_key=system", "data.system_prompt=x"),
    ),
    Case(
        "option that another key sets",
        "is no option of a template; set data.max_prompt_length",
        ("data.chat_template=true", "data.chat_template_options={max_length: 3}"),
        shows=("data.chat_template_options.max_length = 3",),
    ),
    Case(
        "row of the assistant's message alone",
        "has no message before the assistant's last; remove the row",
        ("data.chat_template=true", "data.last_assistant_message=drop"),
        breaks=chat(ENDED[1:]),
    ),
    Case(
        "messages that the template refuses",
        "the chat template refuses the messages (no user)",
        ("data.chat_template=true",),
        breaks=chat([{"role": "tool", "content": "x"}]),
        shows=("line 1",),
    ),
    Case(
        "fewer prompts than a batch",
        "lower it or add prompts",
        ("rollout.rollout_batch_size=7", "training.global_batch_size=28"),
        shows=("there are 6 training prompts",),
    ),
    Case(
        "no held-out prompts",
        "there are no held-out prompts; set data.eval_prompts",
        ("evaluation.eval_interval=1",),
    ),
    Case(
        "held-out file missing",
        "no such file; give a path relative to the working directory",
        ("data.eval_prompts=absent.jsonl",),
        shows=("data.eval_prompts = ",),
    ),
    Case(
        "task with unknown settings",
        "refused",
        shows=("kwargs {'letters': 3}", "correct them"),
        overrides=("data.prompts=null", "data.task={name: spell_backward, kwargs: {letters: 3}}"),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prompts(case, model, tmp_path):
    config = small_config(model, tmp_path)
    if case.breaks:
        case.breaks(config, tmp_path)
    check(case, start(config, tmp_path, *case.overrides))


def test_parquet_without_its_library(model, tmp_path, monkeypatch):
    # As Python marks a module that can't be imported.
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    config = small_config(model, tmp_path)
    named("prompts.parquet")(config, tmp_path)
    case = Case("Parquet without pyarrow", "needs pyarrow: pip install 'megatron-gspo[data]'")
    check(case, start(config, tmp_path))


def test_longer_prompts_are_dropped_and_counted(model, tmp_path):
    long = {"prompt": ROWS[0]["prompt"] * 8, "answer": ""}
    config = small_config(model, tmp_path)
    write_rows(tmp_path / "prompts.jsonl", [*ROWS[:2], long, long])
    done = start(config, tmp_path)
    assert done.code == 0
    assert "2 prompts are longer than data.max_prompt_length and were dropped" in done.text


def test_the_same_question_twice_makes_two_groups(model, tmp_path):
    """Groups go by the prompt's place in the file, never by its text: their statistics don't
    mix.
    """
    config = small_config(model, tmp_path, tracking={"samples_per_step": 8, "plot": False})
    write_rows(tmp_path / "prompts.jsonl", [ROWS[0], ROWS[0]])
    assert start(config, tmp_path).code == 0
    written = (Path(config["run_dir"]) / "samples" / "step_000001.jsonl").read_text().splitlines()
    indices = [json.loads(line)["prompt_index"] for line in written]
    assert sorted(indices) == [0] * 4 + [1] * 4
