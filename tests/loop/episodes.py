"""Episodes for the tests of this folder."""

from __future__ import annotations

from typing import Any

from megatron_gspo.data.sample import Sample
from megatron_gspo.data.turn_spans import TURNS
from tests.support.samples import make_sample


def episode(*rewards: float, prompt: int = 0, **more: Any) -> Sample:
    """Turns of two tokens with one observed token between them."""
    length = 3 * len(rewards) - 1
    turns = [
        {"start": 3 * k, "end": 3 * k + 2, "reward": reward} for k, reward in enumerate(rewards)
    ]
    mask = [token % 3 < 2 for token in range(length)]
    values = {"prompt_index": prompt, "reward": float(sum(rewards)), "metadata": {TURNS: turns}}
    return make_sample(1, length, mask=mask, log_probs=False, **(values | more))
