"""Small models and prompts, made from a seed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from tests.support.tiny_models import tiny_config
from tests.support.transformers_reference import stored_name

VOCABULARY = 40
EOS = 1  # of tiny_config
_SIZES = dict(
    vocab_size=VOCABULARY,
    num_hidden_layers=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.02,
)


def moe_config(**changes) -> PretrainedConfig:
    return tiny_config("moe", **{**_SIZES, **changes})


def dense_config(**changes) -> PretrainedConfig:
    return tiny_config("dense", **{**_SIZES, "tie_word_embeddings": True, **changes})


def sink_config(**changes) -> PretrainedConfig:
    """gpt-oss with a window shorter than the prompts."""
    return tiny_config("gpt_oss", **{**_SIZES, "sliding_window": 4, "swiglu_limit": 2.0, **changes})


def window_config(**changes) -> PretrainedConfig:
    """Qwen3 with a window in its second layer."""
    windows = dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return dense_config(**{**windows, **changes})


def next_config(**changes) -> PretrainedConfig:
    return tiny_config("next", **{**_SIZES, "num_hidden_layers": 4, **changes})


def part_config(**changes) -> PretrainedConfig:
    """Qwen3.5 with experts, as the language model of a model with images."""
    return tiny_config("qwen35_moe", **{**_SIZES, "num_hidden_layers": 4, **changes})


def reference_model(config: PretrainedConfig, seed: int = 0, scale: float = 6.0) -> PreTrainedModel:
    """The library's own model; weights scaled up so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.uniform_(-1.0, 1.0)
        elif parameter.dim() > 1:
            parameter.mul_(scale)
    return model


def checkpoint(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of `model` under their checkpoint names, written out by hand for the experts."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        # As in memory, the latter as part of a model.
        if model.config.model_type in ("gpt_oss", "qwen3_5_moe_text"):
            is_part = model.config.model_type != "gpt_oss"
            tensors[name.replace("model.", "model.language_model.", 1) if is_part else name] = (
                tensor.clone()
            )
            continue
        of_experts = tensor.dim() == 3 and kind in ("gate_up_proj", "up_proj", "down_proj")
        for expert in range(tensor.shape[0] if of_experts else 0):
            weight = tensor[expert]
            if kind != "gate_up_proj":
                tensors[f"{prefix}.{expert}.{kind}.weight"] = weight.clone()
            else:
                half = weight.shape[0] // 2
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = weight[:half].clone()
                tensors[f"{prefix}.{expert}.up_proj.weight"] = weight[half:].clone()
        if not of_experts:
            tensors[name] = tensor.clone()
    return {stored_name(name, model.config.model_type): tensor for name, tensor in tensors.items()}


def loaded_engine(
    config: PretrainedConfig, weights: Mapping[str, torch.Tensor], **settings: Any
) -> EmbeddedEngine:
    """An engine that serves the weights (checkpoint names) as version 0."""
    engine = EmbeddedEngine(config, **settings)
    engine.update_weights(weights.items(), version=0)
    return engine


def prompts(count: int, seed: int = 0, shortest: int = 2, longest: int = 11) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [
        Prompt(100 + i, rng.integers(2, VOCABULARY, n), text="", answer=None)
        for i, n in enumerate(lengths)
    ]


def teacher_forced(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """[R] log-probs of the response tokens from one forward pass of the library's model."""
    logits = model(torch.from_numpy(sample.tokens)[None]).logits[0].double() / temperature
    log_probs = logits.log_softmax(-1)[
        torch.arange(sample.length - 1), torch.from_numpy(sample.tokens[1:])
    ]
    return log_probs[sample.prompt_length - 1 :].numpy()
