"""Perturbed routers of the embedded engine: the log-probs and routes are those of a plain pass
with the same noise, that of examples/collapse.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.embedded.perturbed_routers import PerturbedRouters
from megatron_gspo.rollout.embedded.route_recorder import RouteRecorder
from megatron_gspo.routing_replay.perturbation import PerturbedPass
from tests.support.collapse_noise import noise_of
from tests.support.reference_models import (
    checkpoint,
    dense_config,
    loaded_engine,
    moe_config,
    prompts,
    reference_model,
)
from tests.support.tiny_models import tiny_config

SAMPLING = SamplingParams(3, 12)
CONFIG = dict(num_experts=16, num_experts_per_tok=4)


def generate(noise, *, max_batch=256, seed=1, **changes):
    config = moe_config(**CONFIG | changes)
    reference = reference_model(config)
    engine = loaded_engine(
        config, checkpoint(reference), return_routed_experts=True, max_batch=max_batch
    )
    if noise is not None:
        engine.perturb_routers(noise)
    return reference, engine.generate(prompts(6), SAMPLING, seed=seed)


@pytest.mark.parametrize("perturb_weights", [False, True])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_samples_are_those_of_a_plain_pass_with_the_same_noise(perturb_weights, norm_topk_prob):
    noise = noise_of(strength=1.0, seed=4, perturb_weights=perturb_weights)
    reference, samples = generate(noise, norm_topk_prob=norm_topk_prob)
    routers = PerturbedRouters(reference)
    recorder = RouteRecorder(reference)
    for sample in samples:
        routers.start(PerturbedPass(noise, "rollout", 1))
        # the prompt is read once for all samples
        names = torch.tensor(
            [(sample.prompt_index, -1), (sample.prompt_index, sample.sample_index)]
        )
        positions = torch.arange(sample.length - 1)
        routers.set_tokens(names, (positions >= sample.prompt_length).long(), positions)
        with torch.no_grad():
            logits = reference(torch.from_numpy(sample.tokens[:-1])[None]).logits[0]
        scores = logits.log_softmax(-1)[positions, torch.from_numpy(sample.tokens[1:])]
        np.testing.assert_allclose(
            sample.rollout_log_probs, scores[sample.prompt_length - 1 :].numpy(), atol=2e-5
        )
        np.testing.assert_array_equal(
            np.sort(sample.routed_experts, -1), np.sort(recorder.last_ids().numpy(), -1)
        )


def test_noise_can_rest():
    """Evaluations without noise do not change the samples that follow."""
    config = moe_config(**CONFIG)
    engine = loaded_engine(config, checkpoint(reference_model(config)), return_routed_experts=True)
    clean = engine.generate(prompts(6), SAMPLING, seed=1)
    noise = noise_of(strength=0.5, seed=4)
    engine.perturb_routers(noise)
    noisy = engine.generate(prompts(6), SAMPLING, seed=1)
    with noise.off():
        rested = engine.generate(prompts(6), SAMPLING, seed=1)
    again = engine.generate(prompts(6), SAMPLING, seed=1)
    routes = [
        [sample.routed_experts for sample in samples] for samples in (clean, rested, noisy, again)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(routes[0], routes[1], strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(routes[2], routes[3], strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(routes[0], routes[2], strict=True))


def test_a_model_without_softmax_routers_is_refused():
    with pytest.raises(ValueError, match="model type qwen3 has no softmax router"):
        PerturbedRouters(reference_model(dense_config()))


@pytest.mark.parametrize("kind", ["moe", "shared", "next", "qwen35_moe_text", "gpt_oss"])
def test_every_softmax_router_is_found(kind):
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    layers = sum(
        type(module).__name__.endswith(("Experts", "ExpertsInterleaved"))
        for module in model.modules()
    )
    assert len(PerturbedRouters(model)._hooks) == layers > 0
