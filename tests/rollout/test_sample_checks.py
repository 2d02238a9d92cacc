"""Samples that an engine may not return are refused in one line that names the sample and the
field.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.sample_checks import check_samples

PROMPTS = [Prompt(4, np.array([2, 3]), "a"), Prompt(9, np.array([5]), "b")]
SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=3)


def good() -> list[Sample]:
    """Two samples of three tokens for each prompt."""
    return [
        Sample(
            prompt.index,
            number,
            np.concatenate([prompt.token_ids, [6, 7, 1]]),
            prompt.length,
            np.ones(3, dtype=bool),
            np.full(3, -0.5, dtype=np.float32),
            "stop",
        )
        for prompt in PROMPTS
        for number in range(2)
    ]


def changed(**values: object) -> list[Sample]:
    return [*good()[:2], replace(good()[2], **values), good()[3]]


def test_what_is_promised_is_accepted():
    check_samples(good(), PROMPTS, SAMPLING, vocab_size=8)
    empty = changed(
        tokens=np.array([5]),
        loss_mask=np.zeros(0, dtype=bool),
        rollout_log_probs=np.zeros(0, dtype=np.float32),
    )
    check_samples(empty, PROMPTS, SAMPLING, vocab_size=8)


def support(*of_tokens: list[int]) -> dict[str, np.ndarray]:
    return {
        "support_lengths": np.array([len(ids) for ids in of_tokens], dtype=np.int32),
        "support_ids": np.concatenate(of_tokens).astype(np.int32),
    }


def top_ids(*, rows: int = 3, largest: int = 7, log_prob: float = -1.0) -> dict[str, np.ndarray]:
    return {
        "rollout_top_ids": np.full((rows, 2), largest, dtype=np.int32),
        "rollout_top_log_probs": np.full((rows, 2), log_prob, dtype=np.float32),
    }


@pytest.mark.parametrize(
    "samples, problem",
    [
        (good()[:3], "the engine gave 3 samples for 2 prompts x 2; give 4"),
        (iter(good()), "the engine gave (list_iterator|generator) samples"),
        ([*good()[:2], None, good()[3]], "the engine's sample 9/0 is a NoneType; give a Sample"),
        (
            [good()[i] for i in (0, 1, 3, 2)],
            "the engine's sample 9/0 is 9/1; give all samples of a prompt together",
        ),
        (
            changed(tokens=np.array([4, 6, 7, 1])),
            "sample 9/0: tokens does not begin with the prompt's 1 token ids",
        ),
        (
            changed(tokens=np.array([5, 6, 7, 8])),
            "sample 9/0: tokens has the id 8; the model's vocabulary ends at 7",
        ),
        (changed(loss_mask=np.ones(2, dtype=bool)), "sample 9/0: loss_mask has shape"),
        (
            changed(rollout_log_probs=np.full(3, np.nan, dtype=np.float32)),
            "rollout_log_probs has 3 non-finite",
        ),
        (changed(**support([6, 7], [7], [2])), "lacks a token of"),
        (changed(**support([6, 8], [7], [1])), "support_ids has the id 8; the model's vocabulary"),
        (changed(**top_ids(rows=2)), "sample 9/0: rollout_top_ids has shape"),
        (changed(**top_ids(largest=8)), "rollout_top_ids has the id 8; the model's vocabulary"),
        (changed(**top_ids(log_prob=0.5)), "rollout_top_log_probs has 0.5; a log-probability is"),
    ],
)
def test_what_is_refused(samples, problem):
    with pytest.raises(EngineError, match=problem) as caught:
        check_samples(samples, PROMPTS, SAMPLING, vocab_size=8)
    assert "\n" not in str(caught.value)
