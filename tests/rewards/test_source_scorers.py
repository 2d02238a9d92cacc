"""Rewards by the verifier of each prompt's source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.config import DataConfig, SourceConfig
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.source_scorers import SourceScorers, source_scorers
from megatron_gspo.rewards.verifiers import VerifierError
from tests.support.samples import make_prompt

LENGTH = """
def score(response, prompt):
    if response == "raise":
        raise ValueError(f"no such thing in {prompt.source}")
    return float(len(response))

def of_all(responses, prompts):
    return [float(len(responses))] * len(responses)

of_all.takes_batch = True
score.description = "the length"
"""


def prompt(source: str, answer: str = "4") -> Prompt:
    return replace(make_prompt(answer=answer), source=source)


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "length.py"
    path.write_text(LENGTH)
    return str(path)


def data(*sources: SourceConfig) -> DataConfig:
    return DataConfig(sources=sources, verifier_timeout=None)


def test_each_response_gets_the_reward_of_its_source(file: str) -> None:
    scorers = source_scorers(
        data(
            SourceConfig(name="exact", prompts="a"),
            SourceConfig(name="long", prompts="b", verifier=f"{file}:score"),
            SourceConfig(name="also_long", prompts="c", verifier=f"{file}:score"),
        )
    )
    assert scorers.description == "the length" and not scorers.needs_whole_batch
    scores = scorers.score_texts(
        [
            ("seven", prompt("long")),
            ("4", prompt("exact")),
            ("raise", prompt("also_long")),
            ("5", prompt("exact")),
            ("ab", prompt("also_long")),
        ]
    )
    np.testing.assert_array_equal(scores.rewards, np.float32([5, 1, np.nan, 0, 2]))
    assert scores.statuses == ("ok", "ok", "error", "ok", "ok")
    assert scores.messages[2] == "ValueError: no such thing in also_long"
    assert scores.counts == {"error": 1, "timeout": 0, "invalid": 0}
    assert len(scorers.score_texts([]).rewards) == 0
    scorers.close()


def test_a_verifier_of_a_batch_sees_the_responses_of_its_source_alone(file: str) -> None:
    scorers = source_scorers(
        data(
            SourceConfig(name="exact", prompts="a"),
            SourceConfig(name="all", prompts="b", verifier=f"{file}:of_all"),
        )
    )
    assert scorers.needs_whole_batch
    asked = [("4", prompt("exact")), ("x", prompt("all")), ("y", prompt("all"))]
    assert scorers.score_texts(asked).rewards.tolist() == [1.0, 2.0, 2.0]


def test_one_verifier_for_all(file: str) -> None:
    scorers = source_scorers(DataConfig(prompts="a", verifier_timeout=None))
    assert isinstance(scorers, SourceScorers)
    assert scorers.score_texts([("4", prompt(""))]).rewards.tolist() == [1.0]
    with pytest.raises(VerifierError):
        source_scorers(data(SourceConfig(name="a", prompts="a", verifier=f"{file}:missing")))
