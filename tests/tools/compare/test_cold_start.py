"""The supervised start: its demonstrations, its command and its failure."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from megatron_gspo.config import load_config
from megatron_gspo.data.sample import Prompt
from megatron_gspo.tools.compare import cold_start
from megatron_gspo.tools.compare.study_plan import ColdStartFiles
from megatron_gspo.tools.copy_examples import EXAMPLE_RUNS
from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

CONFIG = EXAMPLE_RUNS / "tiny_gspo.yaml"
RUNS = load_config(CONFIG)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ColdStartFiles:
    files = ColdStartFiles(tmp_path_factory.mktemp("cold_start"))
    write_tiny_model(
        files.model,
        TinyModel(hidden=16, layers=1, experts=2, expert_width=8),
        words=[cold_start.INSTRUCTION],
    )
    cold_start.write_demonstrations(files, RUNS)
    return files


@pytest.fixture(scope="module")
def prompts(files) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Held out, and to train on."""
    return cold_start.held_out_and_training(files.model, RUNS)


def rows(file) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def questions(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_training_and_held_out_prompts_share_no_question(prompts):
    held_out, training = prompts
    assert held_out and training and not set(questions(held_out)) & set(questions(training))


def test_held_out_answers_are_right_and_demonstrations_have_mistakes_in_some_letters(
    files, prompts
):
    held_out, training = prompts
    assert rows(files.held_out) == [{"prompt": p.text, "answer": p.answer} for p in held_out]
    demonstrated = rows(files.demonstrations)
    assert [row["prompt"] for row in demonstrated] == questions(training)
    pairs = [
        (a, b)
        for row, p in zip(demonstrated, training, strict=True)
        for a, b in zip(row["answer"], p.answer or "", strict=True)
    ]
    wrong = sum(a != b for a, b in pairs) / len(pairs)
    expected = cold_start.MISTAKES * 25 / 26  # a random letter may be the right one
    deviation = (expected * (1 - expected) / len(pairs)) ** 0.5
    assert abs(wrong - expected) < 5 * deviation
