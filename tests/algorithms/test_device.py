"""All temporaries are on the inputs' device, and nothing is read back.

The meta device holds shapes without values: mixing it with the CPU or reading a number raises, as
on a GPU it would raise or wait.
"""

import pytest
import torch

from megatron_gspo.algorithms import (
    PRESETS,
)

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
