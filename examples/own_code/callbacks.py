"""A callback of one's own: measures repeated responses and ends a run whose policy has found one
answer for everything.

callbacks: [examples/own_code/callbacks.py:RepeatedResponses]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop.callbacks import AfterStep, Callback


class RepeatedResponses(Callback):
    """Stops when every response of a rank equals its first one, for three steps in a row."""

    def __init__(self) -> None:
        self.steps_in_a_row = 0

    def after_rollout(self, step: int, batch: SampleBatch) -> Mapping[str, float]:
        """The share of the responses that differ from the first of their rank."""
        texts = [sample.text for sample in batch.samples]
        distinct = sum(text != texts[0] for text in texts)
        total = torch.tensor(batch.sum(distinct, len(texts)))
        return {"own/distinct": float(total[0] / total[1])}

    def after_step(self, step: int, metrics: Mapping[str, float]) -> AfterStep:
        """Counts the steps without a distinct response."""
        repeated = metrics["own/distinct"] == 0
        self.steps_in_a_row = self.steps_in_a_row + 1 if repeated else 0
        if self.steps_in_a_row < 3:
            return AfterStep()
        return AfterStep(stop=f"step {step}: all responses were equal for three steps")

    def state(self) -> dict[str, Any]:
        """Saved with every checkpoint."""
        return {"steps_in_a_row": self.steps_in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """A resumed run goes on counting."""
        self.steps_in_a_row = state["steps_in_a_row"]
