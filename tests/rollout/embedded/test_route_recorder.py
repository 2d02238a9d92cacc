"""The embedded engine's routes are those of the library's own forward pass over the finished
sequences.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig

from megatron_gspo.config import SamplingParams
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.embedded import route_recorder
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.routing_replay.routes import RouteShape, check_routes
from tests.support.reference_models import (
    checkpoint,
    dense_config,
    loaded_engine,
    moe_config,
    prompts,
    reference_model,
)

CONFIGS = {
    "8 experts, 2 active": dict(),
    "16 experts, 4 active": dict(num_experts=16, num_experts_per_tok=4),
    "256 experts": dict(num_experts=256, num_experts_per_tok=4, moe_intermediate_size=4),
    "257 experts": dict(num_experts=257, num_experts_per_tok=4, moe_intermediate_size=4),
    "1 active": dict(num_experts_per_tok=1),
    "dense layers in between": dict(
        num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1]
    ),
}
SAMPLED = SamplingParams(3, 20)
GREEDY = SamplingParams(2, 15, temperature=0.0)


def build(changes, **settings):
    config = moe_config(**changes)
    reference = reference_model(config)
    return reference, loaded_engine(config, checkpoint(reference), **settings)


def naive_routes(model, tokens):
    """[L-1, layers, k] sets of experts from one plain pass: the k largest router logits of each
    position.
    """
    logits = model(torch.from_numpy(tokens[:-1])[None], output_router_logits=True).router_logits
    k = model.config.num_experts_per_tok
    return np.stack([layer.topk(k, -1).indices.sort(-1).values.numpy() for layer in logits], axis=1)


def assert_routes(samples, reference):
    for sample in samples:
        sample.check()
        assert sample.missing_routes is None
        np.testing.assert_array_equal(
            np.sort(sample.routed_experts, -1), naive_routes(reference, sample.tokens)
        )


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_row_equals_that_of_a_plain_pass(name, sampling):
    reference, engine = build(CONFIGS[name], return_routed_experts=True, eos_token_ids=range(1, 5))
    samples = engine.generate(prompts(16), sampling, seed=1)
    lengths = {s.response_length for s in samples}
    # Early stops, and responses cut off.
    assert min(lengths) < 8 and max(lengths) == sampling.max_response_length
    assert len({s.prompt_length for s in samples}) > 4
    assert_routes(samples, reference)
    config = reference.config
    shape = RouteShape(2, config.num_experts_per_tok, config.num_experts)
    assert check_routes(samples, shape) == 0
    assert {s.routed_experts.dtype for s in samples} == {shape.dtype}
    used = np.unique(np.concatenate([s.routed_experts.reshape(-1) for s in samples]))
    assert len(used) > min(config.num_experts, 60) // 2  # not a router that always chooses the same


@pytest.mark.parametrize("limit", [128, 129, 130, 300])
def test_responses_beyond_a_block_of_steps(limit):
    reference, engine = build(
        dict(max_position_embeddings=400), return_routed_experts=True, eos_token_ids=[39]
    )
    samples = engine.generate(prompts(3), SamplingParams(2, limit, temperature=0.5), seed=4)
    assert max(s.response_length for s in samples) == limit
    assert_routes(samples, reference)


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_recording_changes_no_bit_and_nothing_is_recorded_when_off(sampling):
    _, with_routes = build({}, return_routed_experts=True)
    _, without = build({})
    for a, b in zip(
        with_routes.generate(prompts(7), sampling, seed=2),
        without.generate(prompts(7), sampling, seed=2),
        strict=True,
    ):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish_reason == b.finish_reason
        assert a.rollout_log_probs.tobytes() == b.rollout_log_probs.tobytes()
        assert a.routed_experts is not None and b.routed_experts is None
    assert not any(module._forward_pre_hooks for module in without.model.modules())


def test_a_dense_model_has_no_routes():
    with pytest.raises(
        ValueError,
        match="model type qwen3 has no MoE layer to return routed experts of: leave them",
    ):
        EmbeddedEngine(dense_config(), return_routed_experts=True)


def test_a_layer_that_is_passed_by_is_named():
    reference, engine = build({}, return_routed_experts=True)
    engine.generate(prompts(1), SamplingParams(1, 2), seed=0)
    block = engine.model.model.layers[1].mlp
    block.forward = lambda hidden: hidden  # what a fused kernel for the whole block would do
    with pytest.raises(EngineError, match="MoE layer 1 chose no experts in a forward pass"):
        engine.generate(prompts(1), SamplingParams(1, 2), seed=0)


@pytest.mark.parametrize(
    "config", [MixtralConfig, Qwen2MoeConfig, OlmoeConfig], ids=lambda kind: kind.model_type
)
def test_other_families(config):
    """Mixtral's name for the number of experts, Qwen2-MoE's shared expert and dense layers."""
    count = {"num_local_experts": 6} if config is MixtralConfig else {"num_experts": 6}
    sizes = dict(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    widths = dict(
        intermediate_size=16, moe_intermediate_size=16, shared_expert_intermediate_size=16
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(**sizes, **widths, **count, num_experts_per_tok=2)
    ).eval()
    recorder = route_recorder.RouteRecorder(model)
    tokens = prompts(1, shortest=11)[0].token_ids
    wanted = naive_routes(model, np.append(tokens, 0))
    assert wanted.shape == (11, 3, 2)
    np.testing.assert_array_equal(recorder.last_ids().sort(-1).values.numpy(), wanted)
