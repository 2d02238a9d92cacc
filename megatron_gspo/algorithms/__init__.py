"""GSPO and related objectives as pure functions on packed tensors. Needs torch only.

objective = preset("gspo")
advantages = group_advantages(rewards, group_ids)
loss, metrics = policy_loss(objective, log_probs=..., old_log_probs=..., advantages=...,
                            loss_mask=..., segment_ids=..., num_sequences=...)
"""

from megatron_gspo.objectives.objective import Objective, preset
from megatron_gspo.objectives.presets import PRESETS

from .advantage_estimators import ResponseTerms, check_advantages, response_advantages
from .advantages import group_advantages
from .distillation import Distillation, divergence, mixed_divergence, token_advantages
from .filters import overlong_penalty, zero_variance_groups
from .gae import gae_advantages
from .importance_sampling import (
    mismatch_metrics,
    sequence_divergence_mask,
    sequence_importance_weights,
    sequence_rejection_mask,
    token_divergence_mask,
    token_importance_weights,
    token_rejection_mask,
)
from .kl import kl_penalty
from .metrics import finish_metrics
from .policy_loss import LossExtras, policy_loss
from .ratio_histogram import RatioHistogram, quantiles_of
from .ratio_statistics import (
    add_ratios,
    effective_sample_size,
    ratio_histograms,
    ratio_quantiles,
)
from .reduction import Reduction, reduction_of
from .sampling_support import over_support
from .score_centering import ScoreCentering, centering
from .segments import Segments
from .surrogate import Clip, check_surrogate
from .token_terms import TokenTerms
from .turn_advantages import turn_advantages, turn_returns
from .value_loss import value_loss

__all__ = [
    "PRESETS",
    "Clip",
    "Distillation",
    "LossExtras",
    "Objective",
    "RatioHistogram",
    "Reduction",
    "ResponseTerms",
    "ScoreCentering",
    "Segments",
    "TokenTerms",
    "add_ratios",
    "centering",
    "check_advantages",
    "check_surrogate",
    "divergence",
    "effective_sample_size",
    "finish_metrics",
    "gae_advantages",
    "group_advantages",
    "kl_penalty",
    "mismatch_metrics",
    "mixed_divergence",
    "over_support",
    "overlong_penalty",
    "policy_loss",
    "preset",
    "quantiles_of",
    "ratio_histograms",
    "ratio_quantiles",
    "reduction_of",
    "response_advantages",
    "sequence_divergence_mask",
    "sequence_importance_weights",
    "sequence_rejection_mask",
    "token_advantages",
    "token_divergence_mask",
    "token_importance_weights",
    "token_rejection_mask",
    "turn_advantages",
    "turn_returns",
    "value_loss",
    "zero_variance_groups",
]
