"""Prompts of a cache are those of the file, also after a crash, damage or a change of the file."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.config import DataConfig
from megatron_gspo.data import prompt_cache
from megatron_gspo.data.prompt_cache import (
    MappedPrompts,
    PromptCache,
    cache_key,
    digests_of,
    read_cache,
)
from megatron_gspo.data.prompt_files import PromptError
from megatron_gspo.data.prompts import PromptSet, load_prompts
from tests.support.prompt_rows import write_jsonl
from tests.support.samples import CharTokenizer
from tests.support.waiting import wait_for

ROWS = [
    {
        "prompt": "a b",
        "answer": "c",
        "level": 1,
        "more": {"x": [1.5, None, 10**30, "é"], "y": True},
    },
    {"prompt": "too long", "answer": ""},
    {"prompt": "dé", "answer": None},
    {"prompt": "\ud800\n", "answer": 7, "text": 'q"\\'},
]
DATA = DataConfig(max_prompt_length=6)
CHANGES = {
    "prompt_key": "question",
    "answer_key": None,
    "chat_template": True,
    "chat_template_options": {"enable_thinking": False},
    "system_prompt": "s",
    "system_prompt_key": "system",
    "last_assistant_message": "drop",
    "prompt_template": "Q{question}",
    "max_prompt_length": 7,
    "overlong_prompts": "error",
}


class CountingTokenizer(CharTokenizer):
    """Adds a line to a file for each text."""

    def __init__(self, log: Path, seconds: float = 0.0) -> None:
        self.log = log
        self.seconds = seconds

    def encode(self, text, add_special_tokens=True):
        time.sleep(self.seconds)
        with self.log.open("a") as file:
            file.write("x\n")
        return super().encode(text, add_special_tokens)

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return write_jsonl(tmp_path / "data.jsonl", ROWS)


def cache_of(file: Path, warnings: list[str] | None = None, folder: str = "cache") -> PromptCache:
    def warn(line: str) -> None:
        assert warnings is not None, line
        warnings.append(line)

    return PromptCache(file.parent / folder, file.parent / "model", warn)


def folder_of(file: Path) -> Path:
    [cache_folder] = [path for path in (file.parent / "cache").iterdir() if path.is_dir()]
    return cache_folder


def assert_same(loaded: PromptSet, file: Path) -> None:
    wanted = load_prompts(file, CharTokenizer(), DATA)
    assert (len(loaded.prompts), loaded.dropped) == (len(wanted.prompts), wanted.dropped) == (3, 1)
    assert loaded.notes == wanted.notes and "half of a surrogate pair" in "".join(loaded.notes)
    np.testing.assert_array_equal(digests_of(loaded.prompts), digests_of(wanted.prompts))
    for ours, theirs in zip(loaded.prompts, wanted.prompts, strict=True):
        ours.check()
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        assert replace(ours, token_ids=theirs.token_ids) == theirs


def test_the_same_prompts_tokenised_once(file):
    tokenizer = CountingTokenizer(file.parent / "log")
    for _ in range(3):
        loaded = cache_of(file).load(file, tokenizer, DATA)
        assert_same(loaded, file)
        assert isinstance(loaded.prompts, MappedPrompts) and loaded.prompts.largest_token == 0xFFFD
    assert tokenizer.count == len(ROWS)
    assert sorted(path.name for path in folder_of(file).iterdir()) == [
        "manifest.json",
        "record_ends.i8",
        "records.json",
        "token_digests.i8",
        "token_ends.i8",
        "tokens.i4",
    ]


def test_positions_and_slices(file):
    prompts = cache_of(file).load(file, CharTokenizer(), DATA).prompts
    assert [prompts[i].text for i in (0, 2, -1, -3)] == ["a b", "\ufffd\n", "\ufffd\n", "a b"]
    with pytest.raises(IndexError):
        prompts[3]
    last_two = prompts[1:]
    assert [(prompt.index, prompt.text) for prompt in last_two] == [
        (1, "dé"),
        (2, "\ufffd\n"),
    ]
    assert len(last_two) == 2
    assert len(prompts[:None]) == 3 and len(prompts[:2][:1]) == 1
    first = prompts[0]
    # A copy: the file stays.
    first.token_ids[0] = 5
    first.metadata["level"] = 5
    assert prompts[0].token_ids[0] == 1 and prompts[0].metadata["level"] == 1


def test_what_the_key_depends_on(file):
    def key(data: DataConfig = DATA, split: str = "train") -> str:
        return cache_key(file, file.parent / "model", data, split)

    known = {key()}
    assert key() in known and key(replace(DATA, shuffle=False, verifier="exact_match")) in known

    def assert_new(candidate: str) -> None:
        assert candidate not in known
        known.add(candidate)

    assert_new(key(split="test"))
    for name, value in CHANGES.items():
        assert_new(key(replace(DATA, **{name: value})))
    for name in ("chat_template.jinja", "tokenizer_config.json", "merges.txt"):
        (file.parent / "model" / name).write_text("1")
        assert_new(key())
    (file.parent / "model" / "merges.txt").write_text("2")
    assert_new(key())
    # Other content of the same size and time.
    stat = file.stat()
    file.write_text(file.read_text().replace("a b", "a c"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert_new(key())
    (file.parent / "model" / "model.safetensors").write_text("weights")
    assert key() in known


def test_every_setting_of_the_format_is_in_the_key():
    others = {
        "prompts",
        "task",
        "sources",
        "eval_prompts",
        "cache_dir",
        "shuffle",
        "code",
        "keep_special_tokens",
    }
    names = {field.name for field in fields(DataConfig)} - others
    assert (
        {name for name in names if not name.startswith("verifier")}
        == set(CHANGES)
        == set(prompt_cache._SETTINGS)
    )


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "record_ends.i8",
        "records.json",
        "token_digests.i8",
        "token_ends.i8",
        "tokens.i4",
    ],
)
@pytest.mark.parametrize("damage", ["truncated", "longer", "gone", "empty"])
def test_a_damaged_cache_is_written_again(name, damage, file):
    cache_of(file).load(file, CharTokenizer(), DATA)
    damaged = folder_of(file) / name
    content = damaged.read_bytes()
    damaged.unlink()
    if damage != "gone":
        damaged.write_bytes(
            {"truncated": content[:-1], "longer": content + b"}", "empty": b""}[damage]
        )
    assert read_cache(damaged.parent) is None
    assert_same(cache_of(file).load(file, CharTokenizer(), DATA), file)
    assert damaged.read_bytes() == content


def _load(file: Path, log: Path, seconds: float) -> None:
    assert_same(cache_of(file).load(file, CountingTokenizer(log, seconds), DATA), file)


def start(file: Path, log: Path, seconds: float) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_load, args=(file, log, seconds))
    process.start()
    return process


def test_processes_at_the_same_time(file):
    log = file.parent / "log"
    processes = [start(file, log, 0.1) for _ in range(4)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert CountingTokenizer(log).count == len(ROWS)


def test_a_writer_that_is_killed(file):
    """Who waits for it takes over, and removes what it left."""
    log = file.parent / "log"
    other = file.parent / "other"
    first = start(file, log, 30.0)
    wait_for(lambda: list((file.parent / "cache").glob("*.tmp")))
    second = start(file, other, 0.0)
    time.sleep(0.2)
    assert second.exitcode is None
    os.kill(first.pid, signal.SIGKILL)
    second.join()
    first.join()
    assert second.exitcode == 0 and CountingTokenizer(other).count == len(ROWS)
    assert not list((file.parent / "cache").glob("*.tmp"))


def test_a_folder_that_cannot_be_made(file):
    (file.parent / "taken").write_text("a file")
    warnings: list[str] = []
    assert_same(cache_of(file, warnings, "taken").load(file, CharTokenizer(), DATA), file)
    [line] = warnings
    assert line.startswith(f"data.cache_dir = {file.parent / 'taken'}: ") and "\n" not in line
    assert "set it to a folder that can be written and has space" in line


def _load_without_space(file: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
    warnings: list[str] = []
    assert_same(cache_of(file, warnings).load(file, CharTokenizer(), DATA), file)
    assert len(warnings) == 1 and "File too large" in warnings[0]


def test_no_space(file):
    process = multiprocessing.get_context("fork").Process(target=_load_without_space, args=(file,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [path.suffix for path in (file.parent / "cache").iterdir()] == [".lock"]


def test_invalid_prompts_are_refused_as_without_a_cache(file):
    for rows, words in (
        ([{"prompt": "a"}], "line 1: key 'answer' is missing"),
        ([], "holds no prompts"),
        ([{"prompt": "abcdefgh", "answer": ""}], "all 1 prompts are longer"),
    ):
        write_jsonl(file, rows)
        with pytest.raises(PromptError, match=words):
            cache_of(file).load(file, CharTokenizer(), DATA)
    with pytest.raises(PromptError, match="no such file"):
        cache_of(file).load(file.parent / "nowhere.jsonl", CharTokenizer(), DATA)
    assert [path.suffix for path in (file.parent / "cache").iterdir()] == [".lock"] * 3
