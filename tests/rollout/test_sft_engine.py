"""Reference answers as samples."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.sft_engine import DemonstrationEngine

EOS = 1
PROMPT = Prompt(7, np.array([5, 6]), "ab", answer="cde")


def sampling(length: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n_samples_per_prompt=n, max_response_length=length)


@pytest.fixture
def engine() -> DemonstrationEngine:
    return DemonstrationEngine(lambda text: [ord(letter) - 90 for letter in text], EOS)


def test_the_response_is_the_answer_and_the_end_token(engine):
    samples = engine.generate([PROMPT], sampling(4), seed=0)
    check_samples(samples, [PROMPT], sampling(4))
    [sample] = samples
    assert sample.response_ids.tolist() == [9, 10, 11, EOS] and sample.finish_reason == "stop"
    assert sample.text == "cde" and sample.reward == 1.0 and sample.rollout_log_probs is None


def test_a_long_answer_is_cut_without_an_end_token(engine):
    [sample] = engine.generate([PROMPT], sampling(3), seed=0)
    assert sample.response_ids.tolist() == [9, 10, 11] and sample.finish_reason == "length"


def test_what_it_refuses(engine):
    with pytest.raises(
        ValueError, match="^n_samples_per_prompt=2: a prompt has one reference answer"
    ):
        engine.generate([PROMPT], sampling(4, n=2), seed=0)
    with pytest.raises(ValueError, match="^prompt 3 has no reference answer"):
        engine.generate([Prompt(3, np.array([5]), "a")], sampling(4), seed=0)


def test_the_stream_of_weights_is_read_to_its_end(engine):
    read = []

    def stream():
        for name in "abc":
            read.append(name)
            yield name, None

    engine.update_weights(stream(), version=4)
    assert read == ["a", "b", "c"]
    assert engine.generate([PROMPT], sampling(4), seed=0)[0].weight_version == 4
