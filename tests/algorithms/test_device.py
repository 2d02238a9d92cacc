"""All temporaries are on the inputs' device, and nothing is read back.

The meta device holds shapes without values: mixing it with the CPU or reading a number raises, as
on a GPU it would raise or wait.
"""

import pytest
import torch

from megatron_gspo.algorithms import (
    PRESETS,
    Segments,
    finite_log_probs,
    mismatch_metrics,
    overlong_penalty,
    sequence_importance_weights,
    token_importance_weights,
)
from megatron_gspo.algorithms.advantages import as_rewards
from megatron_gspo.algorithms.segments import segment_sums
from megatron_gspo.algorithms.turn_advantages import turn_numbers

from .reference import call_policy_loss, complete_preset

META = torch.device("meta")
IDS = torch.empty(6, dtype=torch.long, device=META)


def values():
    return torch.empty(6, device=META)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
@pytest.mark.parametrize("name", PRESETS)
def test_policy_loss(name, coefficient):
    log_probs = values().requires_grad_()
    loss, metrics = call_policy_loss(
        complete_preset(name, kl_loss_coef=coefficient, entropy_coef=coefficient),
        log_probs=log_probs,
        old_log_probs=values(),
        advantages=values(),
        ref_log_probs=values(),
        entropy=values(),
        loss_mask=values(),
        segment_ids=IDS,
        num_sequences=2,
        num_tokens=6,
        num_segments=2,
    )
    loss.backward()
    assert {x.device for x in (loss, log_probs.grad, *metrics.values())} == {META}


def test_corrections_and_sums():
    assert segment_sums(values(), IDS, 2).device == META
    assert token_importance_weights(values(), values(), values()).device == META
    assert (
        sequence_importance_weights(values(), values(), Segments(values(), IDS, 2)).device == META
    )
    metrics = mismatch_metrics(values(), values(), values(), num_tokens=2)
    assert {x.device for x in metrics.values()} == {META}
    none = mismatch_metrics(*(torch.empty(0, device=META) for _ in range(3)), num_tokens=1)
    assert {x.device for x in none.values()} == {META}


def test_rewards():
    rewards, ids = as_rewards(values(), torch.zeros(6, dtype=torch.long))
    assert (rewards.device, ids.device, rewards.dtype) == (META, META, torch.float64)
    assert overlong_penalty(values(), max_length=3, buffer=2).device == META


def test_turns():
    assert turn_numbers(IDS).device == META


def test_a_filter_has_to_read_its_count():
    with pytest.raises((RuntimeError, NotImplementedError)):
        finite_log_probs(values(), values(), IDS, 2)
