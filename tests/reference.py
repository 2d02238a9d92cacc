"""The slow truth: Transformers in float64, one sequence at a time, objectives written as loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_gspo.algorithms import Objective
from megatron_gspo.data.sample import Sample


def load_reference(path: str) -> torch.nn.Module:
    """The Hugging Face model in float64, experts computed one by one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()


def response_log_probs(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response tokens, float64 ``[R]``."""
    tokens = torch.from_numpy(sample.tokens)[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, sample.prompt_length - 1 : -1] / temperature
    log_softmax = torch.log_softmax(logits, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, tokens[0, sample.prompt_length :, None])[:, 0], entropy


def naive_loss(
    objective: Objective, model: torch.nn.Module, samples: Sequence[Sample], temperature: float = 1.0
) -> Tensor:
    """The negative objective of a whole mini-batch, as the papers write it: a loop over sequences and tokens."""
    trained = [sample for sample in samples if sample.loss_mask.any()]
    tokens = sum(int(sample.loss_mask.sum()) for sample in trained)
    total = torch.zeros((), dtype=torch.float64)
    for sample in trained:
        log_probs, entropy = response_log_probs(model, sample, temperature)
        kept = [t for t in range(sample.response_length) if sample.loss_mask[t]]
        weight = {
            "sequence_mean": 1 / (len(kept) * len(trained)),
            "token_mean": 1 / tokens,
            "constant": 1 / (len(trained) * (objective.constant_length or 1)),
        }[objective.aggregation]
        for t, term in zip(kept, _terms(objective, log_probs, sample, kept), strict=True):
            term = term + objective.entropy_coef * entropy[t]
            if objective.kl_loss_coef:
                term = term - objective.kl_loss_coef * _kl(objective, log_probs[t], float(sample.ref_log_probs[t]))
            total = total - weight * term
    return total


def _terms(objective: Objective, log_probs: Tensor, sample: Sample, kept: Sequence[int]) -> list[Tensor]:
    level = objective.importance_sampling_level
    advantages = [float(sample.advantages[t]) for t in kept]
    if level == "none":
        return [advantage * log_probs[t] for t, advantage in zip(kept, advantages, strict=True)]
    log_ratios = [log_probs[t] - float(sample.old_log_probs[t]) for t in kept]
    sequence = torch.exp(sum(log_ratios) / len(log_ratios))
    ratios = {
        "token": [torch.exp(x) for x in log_ratios],
        "sequence": [sequence for _ in kept],
        "sequence_token": [sequence.detach() * torch.exp(log_probs[t] - log_probs[t].detach()) for t in kept],
    }[level]
    low, high = 1 - objective.epsilon_low, 1 + objective.epsilon_high
    return [torch.minimum(r * a, r.clamp(low, high) * a) for r, a in zip(ratios, advantages, strict=True)]


def _kl(objective: Objective, log_prob: Tensor, reference: float) -> Tensor:
    d = reference - log_prob
    return {"k1": -d, "k2": d.square() / 2, "k3": torch.exp(d) - 1 - d}[objective.kl_estimator]


def checkpoint_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients under the names of a Hugging Face checkpoint; Transformers fuses the experts in memory, split them."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(gradient):
                gate, up = both.chunk(2, dim=0)
                prefix = name.removesuffix("gate_up_proj")
                gradients[f"{prefix}{e}.gate_proj.weight"], gradients[f"{prefix}{e}.up_proj.weight"] = (
                    gate,
                    up,
                )
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(gradient):
                gradients[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down
        else:
            gradients[name] = gradient
    return gradients


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient is furthest off, and its error relative to the parameter's own gradient norm.

    A parameter with (nearly) no gradient is measured against the typical norm, so that rounding noise isn't divided
    by zero.
    """
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))[:3]
    norms = {name: float(value.norm()) for name, value in expected.items()}
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()) / len(norms))
    errors = {
        name: float((found[name].double() - expected[name]).norm()) / max(norms[name], floor) for name in expected
    }
    name = max(errors, key=lambda key: errors[key])
    return name, errors[name]
