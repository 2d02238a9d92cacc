"""Prompt files that are empty, damaged, or don't fit the model and the batch; and what is
dropped and counted.
"""

from __future__ import annotations

import gzip
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


def empty_eval(config, folder):
    (folder / "eval.jsonl").write_text("")
    config["data"]["eval_prompts"] = str(folder / "eval.jsonl")


def folder(*names, split=""):
    """A folder with a file of one row for each name."""

    def write(config, folder):
        for name in names:
            (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            write_rows(folder / "data" / name, ROWS[:1])
        config["data"]["prompts"] = f"{folder}/data{split}"

    return write


def split_of_a_file(config, folder):
    config["data"]["prompts"] += ":test"


def held_out_without_split(config, folder):
    (folder / "held_out").mkdir()
    write_rows(folder / "held_out" / "train.jsonl", ROWS)
    config["data"]["eval_prompts"] = str(folder / "held_out")


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
        "empty prompt file",
        "holds no prompts; give it at least one row",
        breaks=text(""),
        shows=("prompts.jsonl",),
    ),
    Case(
        "prompt file of blank lines",
        "holds no prompts; give it at least one row",
        breaks=text("\n \n"),
    ),
    Case(
        "prompt file missing",
        "no such file; give a path relative to the working directory",
        ("data.prompts=absent.jsonl",),
        shows=("data.prompts = ", "absent.jsonl"),
    ),
    Case(
        "no prompts named",
        "the prompts come from exactly one of data.prompts and data.task",
        ("data.prompts=null",),
    ),
    Case(
        "a directory that is no dataset",
        "not a saved dataset",
        breaks=directory,
        shows=("save_to_disk",),
    ),
    Case(
        "unknown kind of file",
        "unknown kind '.txt'; use .jsonl, .parquet",
        breaks=named("prompts.txt"),
    ),
    Case("compressed file", "unknown kind '.zip'", breaks=named("prompts.zip", b"PK")),
    Case(
        "packed file that is cut off",
        "cannot be read (Compressed file ended before",
        breaks=named("prompts.jsonl.gz", gzip.compress(b"{}")[:-5]),
        shows=("prompts.jsonl.gz line 1",),
    ),
    Case(
        "CSV with another number of fields",
        "has more fields than the first line; quote what has a comma",
        breaks=named("prompts.csv", b"prompt,answer\na,b,c\n"),
        shows=("prompts.csv line 2",),
    ),
    Case(
        "folder of several formats",
        "has files of several formats (.csv, .jsonl); give a glob of one",
        breaks=folder("a.csv", "b.jsonl"),
    ),
    Case(
        "folder of several configurations",
        "has one split in several folders (main, other); give one of them",
        breaks=folder("main/train.jsonl", "other/train.jsonl"),
    ),
    Case(
        "split that is not there",
        "has no split 'dev'; it has test, train; name one, as",
        breaks=folder("train.jsonl", "test.jsonl", split=":dev"),
    ),
    Case("split of a file", "has no splits; leave out :test", breaks=split_of_a_file),
    Case(
        "held-out split that is not named",
        "has no split test or validation; it has train; name one, as",
        breaks=held_out_without_split,
    ),
    Case("empty list of files", "names no file; name one, or set it to null", ("data.prompts=[]",)),
    Case(
        "row that is nested too deeply",
        "is nested too deeply",
        breaks=text('{"x": ' + "[" * 100_000),
        shows=("prompts.jsonl line 1",),
    ),
    Case(
        "number of thousands of digits",
        "has a number of more digits than Python reads; write it as text, in quotes",
        breaks=text('{"prompt": "a", "answer": ' + "9" * 5000 + "}"),
        shows=("prompts.jsonl line 1",),
    ),
    Case(
        "infinite answer",
        "is inf, no number; correct it, or write it as text",
        breaks=text('{"prompt": "a", "answer": Infinity}'),
        shows=("line 1: key 'answer'",),
    ),
    Case(
        "prompt with an image",
        "a part of type 'image_url'; only text is trained, remove the part or the row",
        breaks=rows(
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "b"}
        ),
        shows=("line 1: message 1 (of role 'user')",),
    ),
    Case(
        "message without content",
        "has no content; give it text",
        breaks=rows({"prompt": [{"role": "user", "content": None}], "answer": "b"}),
        shows=("line 1: message 1 (of role 'user')",),
    ),
    Case(
        "message with an object as content",
        "has a dict as content; it must be text",
        breaks=rows({"prompt": [{"role": "user", "content": {"a": 1}}], "answer": "b"}),
    ),
    Case(
        "options without a template",
        "needs the chat template; set data.chat_template: true",
        ("data.chat_template_options={enable_thinking: false}",),
        shows=("data.chat_template_options = ",),
    ),
    Case(
        "system messages without a template",
        "needs the chat template; set data.chat_template: true",
        ("data.system_prompt_key=system",),
        shows=('data.system_prompt_key = "system"',),
    ),
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
        "row that ends with the assistant's message",
        "ends with a message of the assistant",
        ("data.chat_template=true",),
        breaks=chat(ENDED),
        shows=("line 1", "set data.last_assistant_message to drop"),
    ),
    Case(
        "row without the answer that ends it",
        "ends with a message of role 'user'",
        ("data.chat_template=true", "data.last_assistant_message=answer"),
        breaks=chat(ENDED[:1]),
    ),
    Case(
        "row of the assistant's message alone",
        "has no message before the assistant's last; remove the row",
        ("data.chat_template=true", "data.last_assistant_message=drop"),
        breaks=chat(ENDED[1:]),
    ),
    Case(
        "option that the template does not read",
        "the tokenizer's chat template does not read it",
        ("data.chat_template=true", "data.chat_template_options={enable_thinkin: false}"),
        breaks=chat(ENDED[:1]),
        shows=("data.chat_template_options.enable_thinkin",),
    ),
    Case(
        "messages that the template refuses",
        "the chat template refuses the messages (no user)",
        ("data.chat_template=true",),
        breaks=chat([{"role": "tool", "content": "x"}]),
        shows=("line 1",),
    ),
    Case(
        "system message in two places",
        "has a system message and system_prompt is set; remove one of them",
        ("data.chat_template=true", "data.system_prompt=x"),
        breaks=chat([{"role": "system", "content": "x"}]),
    ),
    Case(
        "Parquet that isn't",
        "not Parquet",
        breaks=named("prompts.parquet", b"PAR1 no more"),
        shows=("write the file again",),
    ),
    Case(
        "line that isn't JSON",
        "write one JSON object a line",
        breaks=text(json.dumps(ROWS[0]) + "\n{oops\n"),
        shows=("prompts.jsonl line 2: not JSON",),
    ),
    Case(
        "line that isn't an object",
        "write one JSON object a line",
        breaks=text("[1]\n"),
        shows=("a JSON list",),
    ),
    Case(
        "line that isn't UTF-8",
        "write one JSON object a line",
        breaks=text(b'{"prompt": "\xff"}\n'),
        shows=("line 1: not JSON ('utf-8' codec",),
    ),
    Case(
        "prompt key missing",
        "set prompt_key to the right one",
        breaks=rows({"question": "a", "answer": "b"}),
        shows=("key 'prompt' is missing (found: answer, question)",),
    ),
    Case(
        "answer key missing",
        "set answer_key to the right one",
        breaks=rows({"prompt": "a"}),
        shows=("key 'answer' is missing",),
    ),
    Case(
        "empty prompt",
        "is empty; remove the row",
        breaks=rows({"prompt": " ", "answer": "b"}),
        shows=("line 1",),
    ),
    Case(
        "prompt of another type",
        "it must be text or a list of chat messages",
        breaks=rows({"prompt": 3, "answer": "b"}),
        shows=("line 1: key 'prompt' is a int",),
    ),
    Case(
        "answer of another type",
        "it must be text or a number",
        breaks=rows({"prompt": "a", "answer": {}}),
        shows=("line 1: key 'answer' is a dict",),
    ),
    Case(
        "chat messages without a template",
        "holds chat messages; set chat_template to true",
        breaks=rows({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}),
    ),
    Case(
        "tokenizer without a chat template",
        "the tokenizer has no chat template",
        ("data.chat_template=true",),
    ),
    Case(
        "template without the question",
        "would drop the question",
        ("data.prompt_template='Solve:'",),
    ),
    Case(
        "all prompts too long",
        "are longer than max_prompt_length 2; raise it",
        ("data.max_prompt_length=2",),
        shows=("all 6 prompts",),
    ),
    Case(
        "one prompt too long, by choice an error",
        "tokens but max_prompt_length is 2; raise it or set overlong_prompts to drop",
        ("data.max_prompt_length=2", "data.overlong_prompts=error"),
        shows=("prompts.jsonl line 1",),
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
        "held-out file empty",
        "holds no prompts; give it at least one row",
        breaks=empty_eval,
        shows=("eval.jsonl",),
    ),
    Case(
        "unknown task",
        "is unknown to reasoning-gym; use one of",
        ("data.prompts=null", "data.task={name: spell_backwards}"),
        shows=("spell_backward",),
    ),
    Case(
        "task with unknown settings",
        "refused",
        shows=("kwargs {'letters': 3}", "correct them"),
        overrides=("data.prompts=null", "data.task={name: spell_backward, kwargs: {letters: 3}}"),
    ),
    Case(
        "task with too few questions",
        "distinct questions were drawn; lower it",
        (
            "data.prompts=null",
            (
                "data.task={name: chain_sum, kwargs: {min_terms: 2, max_terms: 2, min_digits: 1, "
                "max_digits: 1}, eval_size: 900, size: 5}"
            ),
        ),
        shows=("eval_size is 900",),
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
    assert (
        done.code == 0
        and "2 prompts are longer than data.max_prompt_length and were dropped" in done.text
    )


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
