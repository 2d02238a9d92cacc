"""The training of the examples' reward model, on a model of a few thousand parameters."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from examples.reward_model.train import (
    Labelled,
    RewardModel,
    label_of,
    labelled_responses,
    write_reward_model,
)
from megatron_gspo.rewards.verifiers import load_verifier
from tests.support.prompt_rows import write_jsonl
from tests.support.samples import make_prompt
from tests.support.training_runs import WORD, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_label_compares_with_the_word_backward():
    assert label_of(f"{WORD} ball", "llab") == 1.0
    assert [label_of(f"{WORD} ball", wrong) for wrong in ("lab", "ball", "llab ", "")] == [0.0] * 4


def test_each_prompt_has_its_samples(model: str, tmp_path: Path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{WORD} {w}"} for w in ("sun", "sea")])
    data = list(labelled_responses(model, str(file), samples=3))
    assert sorted(example.prompt for example in data) == [f"{WORD} sea"] * 3 + [f"{WORD} sun"] * 3
    assert len({example.response for example in data}) > 1


def test_the_verifier_gives_the_logits_of_the_training(model: str, tmp_path: Path):
    """Prompts and responses of the same letters are different ones."""
    words = ["sun", "sea", "sky", "dog"]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{WORD} {word}"} for word in words])
    output = str(tmp_path / "reward_model")
    write_reward_model(model, str(file), str(file), output, epochs=1, seed=0)
    trained = RewardModel(output)
    pairs = [("ball", "lab"), ("bal", "llab"), ("sun", "nus"), ("sun", "")]
    data = [Labelled(f"{WORD} {word}", response, 0.0) for word, response in pairs]
    expected = trained.logits(data).tolist()
    verifier = load_verifier("reward_model", {"path": output})
    prompts = []
    for number, example in enumerate(data):
        prompt = make_prompt(number)
        prompt.messages = [{"role": "user", "content": example.prompt}]
        prompts.append(prompt)
    assert verifier([example.response for example in data], prompts) == pytest.approx(
        expected, rel=1e-5
    )
    assert len(set(expected)) == 4


def test_the_training_tells_right_from_wrong(model: str):
    random.seed(0)
    torch.manual_seed(0)
    data = [
        Labelled(f"{WORD} {word}", response, label_of(f"{WORD} {word}", response))
        for word in ("sun", "sea", "sky", "dog")
        for response in (word[::-1], word)
    ]
    reward_model = RewardModel(model)
    reward_model.train(data, epochs=60)
    assert reward_model.accuracy(data) == 1.0
