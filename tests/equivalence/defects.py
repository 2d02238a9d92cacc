"""Errors of small defects in the reference, for comparison with the tolerances.

Each is computed like the truth, in float64 by Transformers and the loops, with one thing wrong; so
the distance is the defect's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.algorithms import reference as loops
from tests.equivalence.cases import SCENARIOS
from tests.equivalence.truth import expect
from tests.support.transformers_reference import (
    checkpoint_gradients,
    load_reference,
    whole_batch,
    worst_error,
)

Defect = Callable[[loops.Batch], loops.Batch]


def _one_token_less(batch: loops.Batch) -> loops.Batch:
    mask = batch.loss_mask.clone()
    mask[int(mask.nonzero()[-1])] = 0.0
    return replace(batch, loss_mask=mask)


def _moved_by_one(batch: loops.Batch) -> loops.Batch:
    return replace(batch, old_log_probs=batch.old_log_probs.roll(1))


def _in_bfloat16(batch: loops.Batch) -> loops.Batch:
    return replace(batch, old_log_probs=batch.old_log_probs.bfloat16().double())


class _EmptyCounted(loops.Batch):
    """A sequence without a trained token is counted all the same."""

    @property
    def num_sequences(self) -> int:
        return self.num_segments


def _empty_counted(batch: loops.Batch) -> loops.Batch:
    return _EmptyCounted(**vars(batch))


DEFECTS: dict[str, tuple[str, Defect]] = {
    "one trained token of the mini-batch is left out": ("grpo", _one_token_less),
    "the sequence without a trained token counts in the mean": ("gspo", _empty_counted),
    "old log-probs are those of the token before": ("gspo_token", _moved_by_one),
    "old log-probs went through bfloat16": ("gspo_token", _in_bfloat16),
}


def measure_defects(path: str) -> dict[str, float]:
    """For each defect the gradient error of the parameter that shows it best, as
    ``worst_error`` measures it.
    """
    model = load_reference(path)
    errors = {}
    for words, (name, defect) in DEFECTS.items():
        scenario = SCENARIOS[name]
        truth = expect(model, scenario)
        model.zero_grad()
        batch = defect(whole_batch(model, truth.samples, scenario.temperature))
        loops.naive_loss(scenario.objective, batch, batch.log_probs, batch.entropy).backward()
        errors[words] = worst_error(checkpoint_gradients(model), truth.gradients)[1]
    errors["the temperature is 1 % off"] = _temperature_error(model)
    return errors


def _temperature_error(model: torch.nn.Module) -> float:
    scenario = SCENARIOS["grpo"]
    truth = expect(model, scenario)
    model.zero_grad()
    batch = whole_batch(model, truth.samples, 1.01 * scenario.temperature)
    loops.naive_loss(scenario.objective, batch, batch.log_probs, batch.entropy).backward()
    return worst_error(checkpoint_gradients(model), truth.gradients)[1]
