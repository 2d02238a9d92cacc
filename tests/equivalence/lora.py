"""The truth about adapters: PEFT on Transformers in float64, and a loop for those that experts
share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megatron_gspo.config import LoRAConfig
from tests.equivalence.cases import ALL, OPTIMIZER, OPTIMIZER_STEPS, TRAINING
from tests.equivalence.truth import ModelFiles, Truth, expect, scenario_samples
from tests.support.peft_reference import adapted, adapter_gradients, adapter_tensors
from tests.support.transformers_reference import (
    gates_of,
    load_reference,
    naive_training,
    whole_batch,
)

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapted:
    """model: of `measure.MODELS`.

    seed: of the adapters, one with which none has too small a gradient to compare.
    """

    model: str
    lora: LoRAConfig
    seed: int = 0


# "some": parts of fused weights alone. Ranks that divide nothing, scales that are no power of two.
ADAPTERS = {
    "lora_each": Adapted("moe", LoRAConfig(rank=3, alpha=5.0), seed=19),
    "lora_shared": Adapted("moe", LoRAConfig(rank=3, alpha=4.0, rslora=True, experts="shared")),
    "lora_some": Adapted(
        "dense", LoRAConfig(rank=5, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
    ),
    "lora_router": Adapted("moe", LoRAConfig(rank=3, alpha=4.0, targets=(*ALL_LINEAR, "gate"))),
    # with larger adapters this model's gradients lose twice as many digits in float32
    "lora_latent": Adapted("deepseek", LoRAConfig(rank=3, alpha=1.0)),
    # attention, a squared ReLU's MLP and experts; Mamba-2 has none
    "lora_nemotron": Adapted("nemotron", LoRAConfig(rank=3, alpha=4.0)),
    "lora_dense_parts": Adapted("shared", LoRAConfig(rank=3, alpha=4.0)),
}


def save_lora_truth(files: ModelFiles, kind: Adapted) -> None:
    """Write the truth about a model with random adapters."""
    path = files.path
    model = load_reference(path)
    lora = kind.lora
    names = ["gspo", "grpo", *(["grpo, replayed"] if gates_of(model) else [])]
    model = adapted(model, path, lora, kind.seed)
    tensors, gradients = (
        partial(function, rank=lora.rank) for function in (adapter_tensors, adapter_gradients)
    )
    scenarios = {name: expect(model, ALL[name], gradients_of=gradients) for name in names}
    before = {name: tensor.clone() for name, tensor in tensors(model, torch.Tensor.detach).items()}
    with torch.no_grad():
        base = whole_batch(load_reference(path), scenarios["gspo"].samples).log_probs
    mini_batches = [scenario_samples(model, TRAINING, seed) for seed in (10, 11, 12)]
    model.zero_grad()
    training = naive_training(
        model, TRAINING.objective, mini_batches, OPTIMIZER, OPTIMIZER_STEPS, tensors
    )
    rest = Truth({}, mini_batches, training, adapters=before, base_log_probs=base)
    files.save(scenarios, rest)
