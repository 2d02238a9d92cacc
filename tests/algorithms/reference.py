"""Packed random batches, and the objectives written once more: loops over sequences in double
precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.algorithms import LossExtras, Objective, ScoreCentering, policy_loss, preset

LONGEST = 1024  # dr_grpo's loss_scale_factor where a test gives none


# Standard deviation of log-ratios by which each preset clips some tokens or sequences and not all.
DRIFTS = {
    "gspo": 5e-4,
    "gspo_token": 5e-4,
    "luspo": 5e-4,
    "gmpo": 0.3,
    "cispo": 1.5,
    "dppo_tv": 0.3,
    "dppo_kl": 0.5,
}


def drift_of(name: str) -> float:
    """The drift of `random_batch` for a preset."""
    return DRIFTS.get(name, 0.2)


def has_token_advantages(objective: Objective) -> bool:
    """Whether the loss is defined for advantages that differ within a response."""
    return objective.importance_sampling_level not in ("sequence", "geometric_mean")


def complete_preset(name: str, **overrides: Any) -> Objective:
    """A preset whose loss can be computed: dr_grpo alone needs one more field."""
    return preset(
        name, **{**({"loss_scale_factor": LONGEST} if name == "dr_grpo" else {}), **overrides}
    )


def call_policy_loss(objective: Objective, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """policy_loss with the fields of LossExtras as keywords too.

    Without rollout_log_probs they are the old ones.
    """
    if objective.needs_rollout_log_probs:
        arguments.setdefault("rollout_log_probs", arguments.get("old_log_probs"))
    extras = LossExtras(**{f.name: arguments.pop(f.name, None) for f in fields(LossExtras)})
    return policy_loss(objective, **arguments, extras=extras)


def centering_weight(weighing: ScoreCentering, ratio: float) -> float:
    """Of a token whose probabilities under policy and rollout engine have this ratio."""
    value = 1.0
    if weighing.bounds is not None:
        value = min(max(ratio, weighing.bounds[0]), weighing.bounds[1])
    if weighing.kept is not None and not weighing.kept[0] <= ratio <= weighing.kept[1]:
        value = 0.0
    return value


# A surrogate in a user's file. By name and not by a function, so that every process loads it.
TAPERED = Objective(
    "tapered",
    importance_sampling_level="token",
    loss_agg_mode="token-mean",
    surrogate=f"{Path(__file__).parents[2]}/examples/own_code/surrogate.py:tapered",
)


@dataclass(frozen=True)
class Batch:
    """[T] each, float64 but for loss_mask and segment_ids. divergence: from a teacher, if there is
    one. centering, centering_advantages: with score centering.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor
    entropy: Tensor
    advantages: Tensor
    loss_mask: Tensor
    segment_ids: Tensor
    num_segments: int
    divergence: Tensor | None = None
    centering: Tensor | None = None
    centering_advantages: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.segment_ids[self.loss_mask > 0].unique().numel()

    @property
    def num_tokens(self) -> int:
        return int((self.loss_mask > 0).sum())

    def take(self, positions: Tensor) -> Batch:
        """The tokens at `positions`, all segments kept."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "num_segments"}
        given = {name: value for name, value in chosen.items() if value is not None}
        return replace(self, **{name: value[positions] for name, value in given.items()})

    def arguments(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | int]:
        """Tensors for policy_loss; fresh, so that each call has its own gradients."""
        floats = {
            name: getattr(self, name).to(dtype).clone()
            for name in (
                "log_probs",
                "old_log_probs",
                "rollout_log_probs",
                "ref_log_probs",
                "entropy",
                "advantages",
            )
        }
        floats["log_probs"].requires_grad_()
        floats["entropy"].requires_grad_()
        return {
            **floats,
            "loss_mask": self.loss_mask,
            "segment_ids": self.segment_ids,
            "num_segments": self.num_segments,
        }


def random_batch(seed: int, *, drift: float, per_token: bool = False, poison: bool = True) -> Batch:
    """Nine sequences of 1 to 40 positions: masks with gaps, two sequences without a trained token,
    extreme values at untrained positions. `drift` is the standard deviation of a sequence's mean
    log-ratio and of its tokens' own.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (9,), generator=g).tolist()
    ids = torch.repeat_interleave(torch.arange(9), torch.tensor(lengths))
    total = ids.numel()

    def normal(n: int = total) -> Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64)

    mask = (torch.rand(total, generator=g) < 0.7).float()
    mask[(ids == 2) | (ids == 8)] = 0
    for i in set(range(9)) - {2, 8}:
        mask[int((ids == i).nonzero()[0])] = 1
    old = -normal().abs() - 0.05
    log_probs = old + drift * (normal(9)[ids] + normal())
    advantages = normal() if per_token else normal(9)[ids]
    batch = Batch(
        log_probs, old, old, log_probs + 0.5 * normal(), normal().abs(), advantages, mask, ids, 9
    )
    batch = replace(
        batch, rollout_log_probs=old - 1.0 + 2 * torch.rand(total, generator=g, dtype=torch.float64)
    )
    if poison:
        for name in (
            "log_probs",
            "old_log_probs",
            "rollout_log_probs",
            "ref_log_probs",
            "entropy",
            "advantages",
        ):
            values = getattr(batch, name)
            holes = (mask == 0).nonzero().flatten()
            extreme = torch.tensor(
                [float("nan"), float("inf"), -float("inf"), 1e30], dtype=torch.float64
            )
            values[holes] = extreme.repeat(total)[: holes.numel()]
    return batch


def naive_loss(objective: Objective, batch: Batch, log_probs: Tensor, entropy: Tensor) -> Tensor:
    """The loss of the whole mini-batch, straight from the formulas, differentiated by autograd
    through everything.
    """
    o = objective
    total = torch.zeros((), dtype=torch.float64)
    for i in range(batch.num_segments):
        tokens = [
            t for t in range(len(log_probs)) if batch.segment_ids[t] == i and batch.loss_mask[t] > 0
        ]
        if not tokens:
            continue
        length = len(tokens)
        log_ratios = {t: log_probs[t] - batch.old_log_probs[t] for t in tokens}
        for t in tokens:
            advantage = batch.advantages[t]
            if o.importance_sampling_level == "none":
                value = log_probs[t] * advantage
            elif _is_off_policy(o, advantage, log_ratios):
                value = torch.zeros((), dtype=torch.float64)
            else:
                ratio = _ratio(o, batch, log_probs, t, log_ratios)
                value = _surrogate(o, ratio, advantage, log_probs[t], batch.old_log_probs[t])
                if o.surrogate == "minirl":
                    value = _minirl(o, ratio, advantage, log_probs[t], batch.rollout_log_probs[t])
            if o.log_ratio_coef:
                value = (
                    value
                    - o.log_ratio_coef * log_ratios[t].clamp(-o.max_log_ratio, o.max_log_ratio) ** 2
                )
            if o.kl_loss_coef:
                d = log_probs[t] - batch.ref_log_probs[t]
                if o.kl_loss_type != "k1":
                    d = d.clamp(-o.max_log_ratio, o.max_log_ratio)
                kl = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[o.kl_loss_type]
                if o.unbiased_kl:
                    kl = kl * torch.exp(log_ratios[t].clamp(-o.max_log_ratio, o.max_log_ratio))
                value = value - o.kl_loss_coef * kl
            if o.entropy_coef:
                value = value + o.entropy_coef * entropy[t]
            if batch.divergence is not None:
                value = value - batch.divergence[t]
            if batch.centering is not None:
                value = value - _centred(o, batch, log_probs, t, log_ratios) * batch.centering[t]
            if o.loss_agg_mode == "seq-mean-token-mean":
                total = total + value / length / batch.num_sequences
            elif o.loss_agg_mode == "token-mean":
                total = total + value / batch.num_tokens
            else:
                total = total + value / o.loss_scale_factor / batch.num_sequences
    return -total


def _is_off_policy(o: Objective, advantage: Tensor, log_ratios: dict[int, Tensor]) -> bool:
    if o.off_policy_mask_threshold is None:
        return False
    divergence = -sum(float(d.detach()) for d in log_ratios.values()) / len(log_ratios)
    return bool(advantage < 0) and divergence > o.off_policy_mask_threshold


def _centred(
    o: Objective, batch: Batch, log_probs: Tensor, t: int, log_ratios: dict[int, Tensor]
) -> float:
    """What multiplies the centering of a token: its advantage or, where its response has one
    ratio, what multiplies its score."""
    if not o.sequence_level:
        return float(batch.centering_advantages[t])
    assert o.surrogate == "clip" and o.dual_clip is None and o.max_log_ratio > 1
    advantage = float(batch.advantages[t])
    ratio = float(_ratio(o, batch, log_probs, t, log_ratios).detach())
    log_prob = float(log_probs[t].detach())
    cut = _cut(o, advantage, ratio, log_prob, float(batch.old_log_probs[t]))
    return 0.0 if any(cut) else advantage * ratio


def _ratio(
    o: Objective, batch: Batch, log_probs: Tensor, t: int, log_ratios: dict[int, Tensor]
) -> Tensor:
    limit = o.max_log_ratio
    if o.importance_sampling_level == "token":
        return torch.exp(log_ratios[t].clamp(-limit, limit))
    if o.importance_sampling_level == "geometric_mean":
        bounded = []
        for u, d in log_ratios.items():
            sign = torch.sign(batch.advantages[u])
            bounded.append(
                sign * torch.minimum(sign * d, sign * d.clamp(-o.epsilon_low, o.epsilon_high))
            )
        return torch.exp((sum(bounded) / len(bounded)).clamp(-limit, limit))
    mean = sum(log_ratios.values()) / len(log_ratios)
    clamped = mean.clamp(-limit, limit)
    if o.importance_sampling_level == "sequence":  # the ratio itself, not its token-wise stand-in
        return torch.exp(clamped)
    if bool(clamped != mean):  # a clamped ratio is a constant
        return torch.exp(clamped).detach()
    return torch.exp(clamped).detach() * torch.exp(log_probs[t] - log_probs[t].detach())


def _minirl(
    o: Objective, ratio: Tensor, advantage: Tensor, log_prob: Tensor, rollout_log_prob: Tensor
) -> Tensor:
    if (advantage > 0 and ratio > 1 + o.epsilon_high) or (
        advantage < 0 and ratio < 1 - o.epsilon_low
    ):
        return log_prob * 0
    return (
        min(math.exp(float(log_prob) - float(rollout_log_prob)), o.max_weight)
        * advantage
        * log_prob
    )


def _surrogate(
    o: Objective, ratio: Tensor, advantage: Tensor, log_prob: Tensor, old_log_prob: Tensor
) -> Tensor:
    if o.importance_sampling_level == "geometric_mean":
        return ratio * advantage
    if o.has_own_surrogate:
        weight = 1.0 if advantage > 0 else min(float(ratio.detach()), 1.0)
        return weight * advantage * log_prob
    if o.surrogate == "cispo":
        return ratio.detach().clamp(o.min_weight or 0, o.max_weight) * advantage * log_prob
    if o.surrogate == "sapo":
        tau = o.tau_pos if advantage > 0 else o.tau_neg
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if o.surrogate in ("dppo_tv", "dppo_kl"):
        if _leaves_trust_region(o, float(advantage), float(log_prob), float(old_log_prob)):
            return log_prob * 0
        return ratio.detach().clamp(max=o.max_weight) * advantage * log_prob
    clipped = torch.clamp(ratio, 1 - o.epsilon_low, 1 + o.epsilon_high)
    value = torch.minimum(ratio * advantage, clipped * advantage)
    if o.dual_clip is not None and advantage < 0:
        value = torch.maximum(value, o.dual_clip * advantage)
    return value


def _leaves_trust_region(
    o: Objective, advantage: float, log_prob: float, old_log_prob: float
) -> bool:
    p = math.exp(log_prob)
    q = math.exp(old_log_prob)
    if advantage * (p - q) <= 0:
        return False
    if o.surrogate == "dppo_tv":
        return abs(p - q) > o.divergence_threshold
    other_p = max(1 - p, 0)
    other_q = max(1 - q, 0)
    others = other_q * math.log((other_q + 1e-8) / (other_p + 1e-8))
    return q * (old_log_prob - log_prob) + others > o.divergence_threshold


def _cut(
    o: Objective, advantage: float, ratio: float, log_prob: float, old_log_prob: float
) -> tuple[bool, bool]:
    """Whether a token is clipped at the lower and at the upper bound."""
    if o.surrogate == "sapo":
        return False, False
    if o.has_own_surrogate:
        return False, advantage < 0 and ratio > 1
    if o.surrogate == "cispo":
        return ratio < (o.min_weight or 0), ratio > o.max_weight
    if o.surrogate in ("dppo_tv", "dppo_kl"):
        leaves = _leaves_trust_region(o, advantage, log_prob, old_log_prob)
        return leaves and advantage < 0, leaves and advantage > 0
    if o.importance_sampling_level == "geometric_mean":
        d = log_prob - old_log_prob
        return advantage < 0 and d < -o.epsilon_low, advantage > 0 and d > o.epsilon_high
    return advantage < 0 and ratio < 1 - o.epsilon_low, advantage > 0 and ratio > 1 + o.epsilon_high


def naive_metrics(objective: Objective, batch: Batch) -> dict[str, float]:
    """Final figures of the mini-batch, counted one by one."""
    o = objective
    out = {}
    clipped_tokens = lower = upper = dual = clipped_sequences = outside = off_policy = 0.0
    ratios = []
    clamped = []
    k3_old = k3_ref = entropy = 0.0
    for i in range(batch.num_segments):
        tokens = [
            t
            for t in range(len(batch.log_probs))
            if batch.segment_ids[t] == i and batch.loss_mask[t] > 0
        ]
        if not tokens:
            continue
        log_ratios = [float(batch.log_probs[t] - batch.old_log_probs[t]) for t in tokens]
        mean = sum(log_ratios) / len(tokens)
        if o.importance_sampling_level == "geometric_mean":
            bounds = [
                _cut(
                    o,
                    float(batch.advantages[t]),
                    1,
                    float(batch.log_probs[t]),
                    float(batch.old_log_probs[t]),
                )
                for t in tokens
            ]
            mean = sum(
                -o.epsilon_low if low else o.epsilon_high if high else d
                for d, (low, high) in zip(log_ratios, bounds, strict=True)
            ) / len(tokens)
        log_weights = [mean if o.sequence_level else log_ratio for log_ratio in log_ratios]
        cut = masked = 0
        for t, log_ratio, log_weight in zip(tokens, log_ratios, log_weights, strict=True):
            ratio = math.exp(_within(log_weight, o.max_log_ratio))
            advantage = float(batch.advantages[t])
            scores = float(batch.log_probs[t]), float(batch.old_log_probs[t])
            is_lower, is_upper = _cut(o, advantage, ratio, *scores)
            upper = upper + is_upper
            lower = lower + is_lower
            cut = cut + (is_upper or is_lower)
            masked += _is_off_policy(
                o, batch.advantages[t], dict(enumerate(map(torch.tensor, log_ratios)))
            )
            dual += o.dual_clip is not None and advantage < 0 and ratio > o.dual_clip
            if not o.sequence_level:
                ratios.append(ratio)
                clamped.append(abs(log_weight) > o.max_log_ratio)
            d = _within(log_ratio, o.max_log_ratio)
            k3_old += math.exp(d) - 1 - d
            outside += not 0.5 <= math.exp(log_ratio) <= 2
            d = _within(float(batch.log_probs[t] - batch.ref_log_probs[t]), o.max_log_ratio)
            k3_ref += math.exp(-d) - 1 + d
            entropy += float(batch.entropy[t])
        if o.sequence_level:
            ratios.append(ratio)
            clamped.append(abs(mean) > o.max_log_ratio)
        clipped_tokens += cut
        by_part = o.importance_sampling_level in ("sequence", "sequence_token")
        clipped_sequences += cut / len(tokens) if by_part else cut > 0
        off_policy += masked / len(tokens)
    n = batch.num_tokens
    ratios = torch.tensor(ratios, dtype=torch.float64)
    out["clip_fraction/tokens"] = clipped_tokens / n
    out["clip_fraction/sequences"] = clipped_sequences / batch.num_sequences
    out["clip_fraction/lower"], out["clip_fraction/upper"] = lower / n, upper / n
    out["ratio/mean"], out["ratio/std"] = float(ratios.mean()), float(ratios.std(correction=0))
    out["ratio_max"], out["ratio_min"] = float(ratios.max()), float(ratios.min())
    out["effective_sample_size"] = float(ratios.sum() ** 2 / (ratios**2).sum() / len(ratios))
    out["kl/old_policy"], out["kl/ref"], out["entropy"] = k3_old / n, k3_ref / n, entropy / n
    out["log_ratio_clamped"] = sum(clamped) / len(clamped)
    out["ratio_token/outside_band"] = outside / n
    if o.dual_clip is not None:
        out["clip_fraction/dual"] = dual / n
    if o.off_policy_mask_threshold is not None:
        out["off_policy_mask/sequences"] = off_policy / batch.num_sequences
    return out


def _within(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)
