"""Task files: their prompts, verifiers, dates, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from megatron_gspo.config import ConfigError, DataConfig, SourceConfig
from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.prompts import PromptError
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.sandbox.case_formats import read_tests
from megatron_gspo.tools.evaluate.task_files import held_out_tasks, load_task
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.samples import make_prompt
from tests.tools.evaluate.public_files import (
    AIME,
    CODEFORCES,
    LIVECODEBENCH,
    write_jsonl,
    write_parquet,
)

TOKENIZER = character_tokenizer()
DATA = DataConfig(prompts="unused", verifier_timeout=60.0)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    ("rows", "verifier"), [(AIME, "math_verify"), (LIVECODEBENCH, "code"), (CODEFORCES[:4], "code")]
)
def test_the_public_files_as_they_are(tmp_path, write, rows, verifier):
    file = write(tmp_path / f"task.{'jsonl' if write is write_jsonl else 'parquet'}", rows)
    task = load_task(file, TOKENIZER, DATA)
    assert task.name == "task" and task.data.verifier == verifier and len(task.prompts) == len(rows)
    assert [prompt.index for prompt in task.prompts] == list(range(len(rows)))
    if verifier == "code":
        assert all(read_tests(prompt.metadata).cases for prompt in task.prompts)
        assert [prompt.answer for prompt in task.prompts] == [None] * len(rows)
    else:
        assert [prompt.answer for prompt in task.prompts] == ["025", "204"]


def test_a_window_of_dates(tmp_path):
    file = write_jsonl(tmp_path / "lcb.jsonl", LIVECODEBENCH)
    window = datetime(2024, 8, 1), datetime(2025, 1, 4)
    task = load_task(file, TOKENIZER, DATA, window=window)
    dates = [prompt.metadata["contest_date"] for prompt in task.prompts]
    assert dates == ["2024-08-03T07:30:00", "2025-01-04T00:00:00"]  # a date is its midnight
    assert task.left_out == {"outside of the dates": 2}
    with pytest.raises(
        PromptError, match="all rows are left out .4 outside of the dates.; give others or a wider"
    ):
        load_task(file, TOKENIZER, DATA, window=(datetime(2026, 1, 1), None))


def test_long_prompts_are_an_error_or_counted(tmp_path):
    file = write_jsonl(tmp_path / "aime.jsonl", [*AIME, {**AIME[0], "problem": "x" * 50}])
    data = replace(DATA, max_prompt_length=20)
    with pytest.raises(
        PromptError, match="line 3: prompt has 50 tokens but max_prompt_length is 20; raise it"
    ):
        load_task(file, TOKENIZER, data)
    task = load_task(file, TOKENIZER, data, {"data.overlong_prompts"})
    assert len(task.prompts) == 2 and task.left_out == {"too long": 1}
    assert len(load_task(file, TOKENIZER, data, limit=1).prompts) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no prompts"),
        ([{"text": "a"}], "key 'prompt' is missing .found: text."),
        (
            [AIME[0], {"problem": "p"}],
            "line 2: key 'answer' is missing, which the rows before it have",
        ),
    ],
)
def test_bad_files(tmp_path, rows, message):
    with pytest.raises(PromptError, match=message):
        load_task(write_jsonl(tmp_path / "task.jsonl", rows), TOKENIZER, DATA)


def test_dates_that_are_missing_or_wrong(tmp_path):
    window = datetime(2024, 1, 1), None
    with pytest.raises(PromptError, match="line 1: has no date .contest_date.; leave out --from"):
        load_task(write_jsonl(tmp_path / "a.jsonl", AIME), TOKENIZER, DATA, window=window)
    rows = [LIVECODEBENCH[0] | {"contest_date": "soon"}]
    with pytest.raises(PromptError, match="line 1: its date can't be read"):
        load_task(write_jsonl(tmp_path / "b.jsonl", rows), TOKENIZER, DATA, window=window)


def test_programs_need_time(tmp_path):
    with pytest.raises(
        ConfigError, match="data.verifier_timeout = 10.0: ends a verification before two programs"
    ):
        load_task(
            write_jsonl(tmp_path / "b.jsonl", LIVECODEBENCH),
            TOKENIZER,
            DataConfig(prompts="unused"),
        )


def test_the_fingerprint_is_of_all_that_scores_depend_on(tmp_path):
    task = load_task(write_jsonl(tmp_path / "aime.jsonl", AIME), TOKENIZER, DATA)
    same = load_task(write_jsonl(tmp_path / "copy.jsonl", AIME), TOKENIZER, DATA)
    answer = load_task(
        write_jsonl(tmp_path / "c.jsonl", [AIME[0] | {"answer": "26"}, AIME[1]]), TOKENIZER, DATA
    )
    verifier = load_task(
        tmp_path / "aime.jsonl", TOKENIZER, replace(DATA, verifier="exact_match"), {"data.verifier"}
    )
    assert task.fingerprint == same.fingerprint
    assert len({each.fingerprint for each in (task, answer, verifier)}) == 3


def test_a_runs_held_out_prompts():
    prompt = Prompt(0, np.array([5]), "a", "b")
    (task,) = held_out_tasks([prompt], DATA)
    assert task.prompts == (prompt,)
    with pytest.raises(ConfigError, match="the run has no held-out prompts; give --tasks FILE"):
        held_out_tasks([], DATA)


def test_each_source_of_a_run_is_a_task():
    words = SourceConfig(name="words", prompts="a")
    maths = SourceConfig(name="maths", prompts="b", verifier="math_verify")
    data = replace(DATA, sources=(words, maths))
    prompts = MixedPrompts({"maths": [make_prompt(0), make_prompt(1)]})
    (task,) = held_out_tasks(prompts, data)
    assert (task.name, task.data.verifier) == ("maths", "math_verify")
    assert [prompt.index for prompt in task.prompts] == [0, 1]
