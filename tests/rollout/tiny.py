"""Small models and prompts, made on the spot from a seed."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from megatron_gspo.data.sample import Prompt, Sample

VOCABULARY = 40
EOS = 1
_SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=64,
    eos_token_id=EOS,
    pad_token_id=0,
    bos_token_id=None,
)


def moe_config(**changes) -> PretrainedConfig:
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    return Qwen3MoeConfig(**{**_SIZES, **experts, "tie_word_embeddings": False, **changes})


def dense_config(**changes) -> PretrainedConfig:
    return Qwen3Config(**{**_SIZES, "tie_word_embeddings": True, **changes})


def reference_model(config: PretrainedConfig, seed: int = 0, scale: float = 6.0) -> PreTrainedModel:
    """The library's own model; weights scaled up so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(scale)
    return model


def checkpoint(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of `model` under their checkpoint names, written out by hand for the experts."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        for expert in range(tensor.shape[0] if kind in ("gate_up_proj", "down_proj") else 0):
            weight = tensor[expert]
            if kind == "down_proj":
                tensors[f"{prefix}.{expert}.down_proj.weight"] = weight.clone()
            else:
                half = weight.shape[0] // 2
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = weight[:half].clone()
                tensors[f"{prefix}.{expert}.up_proj.weight"] = weight[half:].clone()
        if kind not in ("gate_up_proj", "down_proj"):
            tensors[name] = tensor.clone()
    return tensors


def prompts(count: int, seed: int = 0, shortest: int = 2, longest: int = 11) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [
        Prompt(100 + i, rng.integers(2, VOCABULARY, n), text="", answer=None) for i, n in enumerate(lengths)
    ]


def teacher_forced(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """[R] log-probs of the response tokens from one forward pass of the library's model."""
    logits = model(torch.from_numpy(sample.tokens)[None]).logits[0].double() / temperature
    log_probs = logits.log_softmax(-1)[torch.arange(sample.length - 1), torch.from_numpy(sample.tokens[1:])]
    return log_probs[sample.prompt_length - 1 :].numpy()
