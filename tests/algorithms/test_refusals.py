"""Inputs that cannot be right are refused in one line. What an Objective refuses is in
`test_objective_checks.py`.
"""

import pytest
import torch

from megatron_gspo.algorithms import (
    Objective,
    Segments,
    group_advantages,
    kl_penalty,
    mismatch_metrics,
    preset,
    sequence_importance_weights,
    token_importance_weights,
)

from .reference import call_policy_loss

ZEROS = torch.zeros(2)
IDS = torch.zeros(2, dtype=torch.long)


def loss(name="gspo", fields=None, **changes):
    inputs = dict(
        log_probs=ZEROS, old_log_probs=ZEROS, advantages=ZEROS, loss_mask=ZEROS, segment_ids=IDS
    )
    return call_policy_loss(
        preset(name, **(fields or {})), **{**inputs, "num_sequences": 1, **changes}
    )


CASES = {
    "rewards (2,) and group_ids (3,)": lambda: group_advantages(ZEROS, torch.zeros(3)),
    "group_ids is torch.float32: must be integers": lambda: group_advantages(ZEROS, ZEROS),
    "std = 'all'": lambda: group_advantages(ZEROS, IDS, std="all"),
    "baseline = 'zero'": lambda: group_advantages(ZEROS, IDS, baseline="zero"),
    "rewards contain NaN or infinity": lambda: group_advantages(ZEROS / 0, IDS),
    "kl_loss_type = 'k4'": lambda: kl_penalty(ZEROS, ZEROS, "k4"),
    "rollout_log_probs has shape (1,), loss_mask (2,)": lambda: mismatch_metrics(
        ZEROS, ZEROS[:1], ZEROS, num_tokens=1
    ),
    "log_probs is torch.float16": lambda: token_importance_weights(ZEROS.half(), ZEROS, ZEROS),
    "threshold = 0.9: must be 1 or more": lambda: sequence_importance_weights(
        ZEROS, ZEROS, Segments(ZEROS, IDS, 1), threshold=0.9
    ),
    "preset name = 'gpo'": lambda: preset("gpo"),
    "clip = 0.2 is not a field": lambda: preset("gspo", clip=0.2),
    "name = None": lambda: Objective(None, "none", "token-mean"),
    "importance_sampling_level = 'word'": lambda: Objective("x", "word", "token-mean"),
    "loss_agg_mode = 'sum'": lambda: Objective("x", "none", "sum"),
    "loss_scale_factor = None": lambda: loss("dr_grpo"),
    "old_log_probs = None": lambda: loss(old_log_probs=None),
    "advantages = None": lambda: loss(advantages=None),
    "rollout_log_probs = None": lambda: loss("minirl", rollout_log_probs=None),
    "ref_log_probs = None with kl_loss_coef = 0.1": lambda: loss(fields={"kl_loss_coef": 0.1}),
    "entropy = None with entropy_coef = 0.1": lambda: loss(fields={"entropy_coef": 0.1}),
    "log_probs is (1, 2)": lambda: loss(log_probs=ZEROS[None]),
    "segment_ids is torch.float32": lambda: loss(segment_ids=ZEROS, num_segments=1),
    "centering with gspo needs the gradient of log_probs": lambda: loss(centering=ZEROS),
    "num_sequences = 0": lambda: loss(num_sequences=0),
    "num_tokens = 0": lambda: loss(num_tokens=0),
}


@pytest.mark.parametrize("words", CASES)
def test_what_cannot_be_right_is_refused_in_one_line(words):
    with pytest.raises(ValueError) as error:
        CASES[words]()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_centred_response_without_gradients_is_refused_and_a_centred_token_is_not():
    log_probs = ZEROS.clone().requires_grad_()
    with torch.no_grad(), pytest.raises(ValueError, match="centering with gspo needs the gradient"):
        loss(log_probs=log_probs, centering=ZEROS)
    assert "loss/score_centering" in loss("grpo", centering=ZEROS)[1]


@pytest.mark.parametrize(
    "key", ["old_log_probs", "ref_log_probs", "entropy", "advantages", "loss_mask", "segment_ids"]
)
def test_lengths_must_agree(key):
    with pytest.raises(ValueError) as error:
        loss(**{key: torch.zeros(3)})
    assert f"{key} is (3,), log_probs (2,)" in str(error.value)


@pytest.mark.parametrize("key", ["log_probs", "old_log_probs", "ref_log_probs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_refused(key, dtype):
    with pytest.raises(ValueError, match=f"{key} is {dtype}.*float32"):
        loss(**{key: ZEROS.to(dtype)})
