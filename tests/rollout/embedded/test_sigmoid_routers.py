"""Latent attention and biased sigmoid routers in the embedded engine, against Transformers' own passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_gspo.config import SamplingParams
from megatron_gspo.routing_replay.router_noise import RouterNoise
from tests.support.reference_models import (
    VOCABULARY,
    checkpoint,
    loaded_engine,
    prompts,
    reference_model,
    teacher_forced,
)
from tests.support.tiny_models import tiny_config

KINDS = ("deepseek", "moonlight", "glm_lite", "glm", "minimax")


def build(kind):
    """A reference with a bias in its routers, and an engine that got its weights."""
    config = tiny_config(kind, vocab_size=VOCABULARY, num_hidden_layers=3, max_position_embeddings=64)
    reference = reference_model(config, scale=1.5)
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)))
    return reference, loaded_engine(config, checkpoint(reference), return_routed_experts=True)


def routes_of(model, tokens):
    """[L - 1, layers, k] sorted: the experts that the modules of a plain pass were called with."""
    seen = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "experts")
    ]
    model(torch.from_numpy(tokens[:-1])[None])
    for hook in hooks:
        hook.remove()
    return np.stack([ids.sort(-1).values.numpy() for ids in seen], axis=1)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_routes_are_those_of_a_plain_pass(kind):
    reference, engine = build(kind)
    samples = engine.generate(prompts(5), SamplingParams(2, 12), seed=1)
    assert len({sample.length for sample in samples}) > 3
    routes = [routes_of(reference, sample.tokens) for sample in samples]
    for sample, expected in zip(samples, routes, strict=True):
        np.testing.assert_allclose(sample.rollout_log_probs, teacher_forced(reference, sample), atol=1e-5)
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), expected)
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    without = [routes_of(reference, sample.tokens) for sample in samples]
    assert any((a != b).any() for a, b in zip(routes, without, strict=True)), "the bias changes the choice"


def test_noise_is_refused():
    with pytest.raises(ValueError, match="deepseek_v3 has no softmax router"):
        build("deepseek")[1].perturb_routers(RouterNoise(0.5, seed=1))
