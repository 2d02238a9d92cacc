"""Every refusal, word for word: what is wrong, its value, and the fix."""

import pytest
import torch

from megatron_gspo.algorithms import (
    Objective,
    Segments,
    group_advantages,
    kl_penalty,
    mismatch_metrics,
    overlong_penalty,
    preset,
    sequence_importance_weights,
    token_importance_weights,
)

from .reference import call_policy_loss

ZEROS = torch.zeros(2)
IDS = torch.zeros(2, dtype=torch.long)
OVERRIDE = "or set allow_nonstandard=True"
CLIP_WORDS = {
    "epsilon_low": "above 0 and at most 1",
    "epsilon_high": "above 0",
    "dual_clip": "above 1, or None to turn it off",
    "kl_loss_coef": "0 or above",
    "entropy_coef": "0 or above",
    "max_log_ratio": "above 0 and at most 80 (exp overflows float32 at 88)",
}
NAMES = (
    "gspo, gspo_token, grpo, dr_grpo, dapo, gmpo, luspo, cispo, sapo, dppo_tv, dppo_kl, minirl,"
    " ppo, sft"
)
FIELDS = (
    "importance_sampling_level, loss_agg_mode, loss_scale_factor, surrogate,"
    " surrogate_options, epsilon_low, epsilon_high, max_weight, min_weight, tau_pos, tau_neg,"
    " divergence_threshold, dual_clip,"
    " off_policy_mask_threshold, log_ratio_coef, kl_loss_coef, kl_loss_type, unbiased_kl,"
    " entropy_coef, max_log_ratio, advantage_estimator, advantage_options, gamma, lam,"
    " advantage_std, advantage_baseline, allow_nonstandard"
)


def loss(name="gspo", fields=None, **changes):
    inputs = dict(
        log_probs=ZEROS, old_log_probs=ZEROS, advantages=ZEROS, loss_mask=ZEROS, segment_ids=IDS
    )
    return call_policy_loss(
        preset(name, **(fields or {})), **{**inputs, "num_sequences": 1, **changes}
    )


CASES = [
    (
        lambda: group_advantages(ZEROS, torch.zeros(3)),
        "rewards (2,) and group_ids (3,): both must be [N], one per response",
    ),
    (
        lambda: group_advantages(ZEROS[None], IDS[None]),
        "rewards (1, 2) and group_ids (1, 2): both must be [N], one per response",
    ),
    (lambda: group_advantages(ZEROS, ZEROS), "group_ids is torch.float32: must be integers"),
    (
        lambda: group_advantages(ZEROS, IDS, std="all"),
        "std = 'all': must be one of sample, population, none",
    ),
    (
        lambda: group_advantages(ZEROS, IDS, baseline="zero"),
        "baseline = 'zero': must be one of mean, leave_one_out",
    ),
    (
        lambda: group_advantages(ZEROS / 0, IDS),
        "rewards contain NaN or infinity: drop those responses first (filters.finite_rewards)",
    ),
    (
        lambda: overlong_penalty(ZEROS, max_length=4, buffer=5),
        "buffer = 5: must be 1 to max_length = 4 tokens",
    ),
    (
        lambda: overlong_penalty(ZEROS, max_length=4, buffer=0),
        "buffer = 0: must be 1 to max_length = 4 tokens",
    ),
    (lambda: kl_penalty(ZEROS, ZEROS, "k4"), "kl_loss_type = 'k4': must be one of k1, k2, k3"),
    (
        lambda: mismatch_metrics(ZEROS[:1], ZEROS, ZEROS, num_tokens=1),
        "log_probs has shape (1,), loss_mask (2,): all must be [T]",
    ),
    (
        lambda: mismatch_metrics(ZEROS, ZEROS[:1], ZEROS, num_tokens=1),
        "rollout_log_probs has shape (1,), loss_mask (2,): all must be [T]",
    ),
    (
        lambda: token_importance_weights(ZEROS.half(), ZEROS, ZEROS),
        "log_probs is torch.float16: compute it in float32",
    ),
    (
        lambda: sequence_importance_weights(ZEROS, ZEROS, Segments(ZEROS, IDS, 1), threshold=0.9),
        "threshold = 0.9: must be 1 or more, it is the largest weight",
    ),
    (
        lambda: preset("gpo"),
        f"preset name = 'gpo': must be one of {NAMES}",
    ),
    (
        lambda: preset("gspo", clip=0.2),
        f"clip = 0.2 is not a field of Objective: must be one of {FIELDS}",
    ),
    (
        lambda: Objective("", "none", "token-mean"),
        f"name = '': must be a non-empty string, such as one of {NAMES}",
    ),
    (
        lambda: Objective(None, "none", "token-mean"),
        f"name = None: must be a non-empty string, such as one of {NAMES}",
    ),
    (lambda: preset("gspo", allow_nonstandard=1), "allow_nonstandard = 1: must be True or False"),
    (
        lambda: Objective("x", "word", "token-mean"),
        (
            "importance_sampling_level = 'word': must be one of token, sequence, sequence_token,"
            " geometric_mean, none"
        ),
    ),
    (
        lambda: Objective("x", "none", "sum"),
        (
            "loss_agg_mode = 'sum': must be one of seq-mean-token-mean, token-mean,"
            " seq-mean-token-sum-norm"
        ),
    ),
    (lambda: preset("gspo", kl_loss_type="k4"), "kl_loss_type = 'k4': must be one of k1, k2, k3"),
    (
        lambda: preset("gspo", advantage_std="all"),
        "advantage_std = 'all': must be one of sample, population, none",
    ),
    (
        lambda: preset("gspo", advantage_baseline="zero"),
        "advantage_baseline = 'zero': must be one of mean, leave_one_out",
    ),
    (
        lambda: preset("dr_grpo", loss_scale_factor=0),
        "loss_scale_factor = 0: must be a positive number of tokens",
    ),
    *[
        (lambda name=name, key=key: preset(name, **{key: -1}), f"{key} = -1: must be {words}")
        for name, key, words in (
            ("cispo", "min_weight", "0 to 1"),
            ("sapo", "tau_pos", "above 0"),
            ("sapo", "tau_neg", "above 0"),
            ("dppo_tv", "divergence_threshold", "above 0"),
            ("grpo", "off_policy_mask_threshold", "0 or above, or None to turn it off"),
            ("grpo", "log_ratio_coef", "0 or above"),
            ("ppo", "gamma", "0 to 1"),
            ("ppo", "lam", "0 to 1"),
        )
    ],
    (
        lambda: preset("gmpo", dual_clip=3.0),
        (
            "dual_clip = 3.0 does not go with importance_sampling_level = 'geometric_mean', which"
            " clips token ratios in the mean: remove it"
        ),
    ),
    (
        lambda: preset(
            "dppo_kl", importance_sampling_level="sequence_token", allow_nonstandard=True
        ),
        (
            "importance_sampling_level = 'sequence_token' with surrogate = 'dppo_kl', which"
            " compares probabilities of tokens: use 'token'"
        ),
    ),
    *[
        (lambda key=key: preset("grpo", **{key: -1}), f"{key} = -1: must be {words}")
        for key, words in CLIP_WORDS.items()
    ],
    (
        lambda: loss("dr_grpo"),
        (
            "loss_scale_factor = None with loss_agg_mode = 'seq-mean-token-sum-norm': set the"
            " longest response in tokens"
        ),
    ),
    (
        lambda: preset("gspo", loss_scale_factor=7),
        (
            "loss_scale_factor = 7 has no effect with loss_agg_mode = 'seq-mean-token-mean': remove"
            " it, or use 'seq-mean-token-sum-norm'"
        ),
    ),
    (
        lambda: preset("grpo", epsilon_low=None),
        "epsilon_low = None with surrogate = 'clip': set it",
    ),
    (
        lambda: preset("gspo", epsilon_high=None),
        "epsilon_high = None with surrogate = 'clip': set it",
    ),
    *[
        (
            lambda key=key: preset("sft", **{key: 1.5 if key == "dual_clip" else 0.2}),
            (
                f"{key} = {1.5 if key == 'dual_clip' else 0.2} has no effect with"
                " importance_sampling_level = 'none': remove it"
            ),
        )
        for key in ("epsilon_low", "epsilon_high", "dual_clip")
    ],
    (
        lambda: Objective("x", "sequence", "token-mean", epsilon_low=3e-4, epsilon_high=4e-4),
        (
            "loss_agg_mode = 'token-mean' weights a sequence ratio by response length, which is"
            f" not GSPO: use 'seq-mean-token-mean', {OVERRIDE}"
        ),
    ),
    (
        lambda: preset("gspo", epsilon_low=0.2),
        (
            "epsilon_low = 0.2 is outside the clip range of a sequence ratio (gspo, 1e-06 to 0.1):"
            f" use about 3e-4, {OVERRIDE}"
        ),
    ),
    (
        lambda: preset("gspo_token", epsilon_high=0.2),
        (
            "epsilon_high = 0.2 is outside the clip range of a sequence ratio (gspo_token, 1e-06"
            f" to 0.1): use about 4e-4, {OVERRIDE}"
        ),
    ),
    (
        lambda: preset("grpo", epsilon_low=3e-4),
        (
            "epsilon_low = 0.0003 is outside the clip range of a token ratio (grpo, 0.01 or more):"
            f" use about 0.2, {OVERRIDE}"
        ),
    ),
    (
        lambda: preset("sft").clip_range,
        "sft has no epsilon_low",
    ),
    (
        lambda: loss(old_log_probs=None),
        "old_log_probs = None: gspo has a ratio, give the rollout policy's log-probs",
    ),
    (lambda: loss(advantages=None), "advantages = None: gspo needs them, see group_advantages"),
    (
        lambda: loss("minirl", rollout_log_probs=None),
        "rollout_log_probs = None: minirl weighs by them, give the rollout engine's",
    ),
    (
        lambda: loss(fields={"kl_loss_coef": 0.1}),
        "ref_log_probs = None with kl_loss_coef = 0.1: give it, or set the coefficient to 0",
    ),
    (
        lambda: loss(fields={"entropy_coef": 0.1}),
        "entropy = None with entropy_coef = 0.1: give it, or set the coefficient to 0",
    ),
    *[
        (
            lambda key=key: loss(**{key: torch.zeros(3)}),
            f"{key} is (3,), log_probs (2,): all must be [T], packed",
        )
        for key in (
            "old_log_probs",
            "ref_log_probs",
            "entropy",
            "advantages",
            "loss_mask",
            "segment_ids",
        )
    ],
    (
        lambda: loss(log_probs=ZEROS[None]),
        "log_probs is (1, 2), log_probs (1, 2): all must be [T], packed",
    ),
    *[
        (
            lambda key=key: loss(**{key: ZEROS.bfloat16()}),
            (
                f"{key} is torch.bfloat16, wrong by up to 0.045 where the clip may be 3e-4: compute"
                " it in float32 (casting it afterwards does not help)"
            ),
        )
        for key in ("log_probs", "old_log_probs", "ref_log_probs")
    ],
    (
        lambda: loss(segment_ids=ZEROS, num_segments=1),
        "segment_ids is torch.float32: must be integers",
    ),
    *[
        (
            lambda name=name: loss(name),
            (
                "num_tokens = None with loss_agg_mode = 'token-mean': give the trained tokens of"
                " the whole mini-batch, over all micro-batches and ranks"
            ),
        )
        for name in ("dapo", "sft")
    ],
    *[
        (
            lambda key=key: loss(**{key: 0}),
            f"{key} = 0: nothing is trained in this mini-batch, skip its optimizer step",
        )
        for key in ("num_sequences", "num_tokens")
    ],
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message[:50] for _, message in CASES])
def test_says_what_is_wrong_and_what_to_do(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
