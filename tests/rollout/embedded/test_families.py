"""Families with experts in the embedded engine: log-probs, routes and biases, against
Transformers' own passes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gspo.config import SamplingParams
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.rollout.embedded.transformers_config import transformers_config
from tests.support.reference_models import (
    VOCABULARY,
    checkpoint,
    loaded_engine,
    prompts,
    reference_model,
    teacher_forced,
)
from tests.support.tiny_models import save_tiny_model, tiny_config

SPARSE = ("deepseek_v32", "glm_dsa")  # attention to the positions that an indexer selects
SIGMOID = (
    "deepseek",
    "moonlight",
    "glm_lite",
    "glm",
    "minimax",
    "nemotron",
    *SPARSE,
)  # routers with a bias
DELTA = ("next", "qwen35_moe")  # with gated delta nets
SOFTMAX = ("gpt_oss", *DELTA)
BIAS = ".e_score_correction_bias"


def build(kind):
    """A reference with a bias in its sigmoid routers, and an engine that got its weights."""
    layers = 4 if kind in SOFTMAX else 3
    sizes = {} if kind == "nemotron" else dict(num_hidden_layers=layers)
    config = tiny_config(kind, vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    # the two forms of a delta rule, token by token and chunked, differ in the rounding of their
    # sums
    reference = reference_model(config, scale=0.6 if kind in DELTA else 1.5)
    for bias in biases(reference).values():
        bias.copy_(torch.linspace(-0.4, 0.4, len(bias)))
    if kind in SPARSE:  # the padding's zeros would give all positions the same score
        padding = reference.model.embed_tokens.weight[0]
        padding.copy_(torch.linspace(-0.4, 0.4, len(padding)))
    returned = dict(return_routed_experts=True, record_selections=kind in SPARSE)
    return reference, loaded_engine(config, checkpoint(reference), **returned)


def biases(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)}


def routes_of(model, tokens):
    """[L - 1, layers, k] sorted: the experts that the modules of a plain pass were called with."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    model(torch.from_numpy(tokens[:-1])[None])
    for hook in hooks:
        hook.remove()
    return np.stack([ids.sort(-1).values.numpy() for ids in seen], axis=1)


def sampled(engine):
    samples = engine.generate(prompts(5), SamplingParams(2, 12), seed=1)
    assert len({sample.length for sample in samples}) > 3
    return samples


def check(samples, reference):
    """Log-probs and routes are those of plain passes; returns the routes."""
    routes = [routes_of(reference, sample.tokens) for sample in samples]
    for sample, expected in zip(samples, routes, strict=True):
        np.testing.assert_allclose(
            sample.rollout_log_probs, teacher_forced(reference, sample), atol=1e-5
        )
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), expected)
    return routes


@pytest.mark.parametrize("kind", SIGMOID + SOFTMAX)
def test_log_probs_and_routes_are_those_of_a_plain_pass(kind):
    reference, engine = build(kind)
    samples = sampled(engine)
    routes = check(samples, reference)
    layers = np.unique(np.concatenate(routes), axis=0)
    assert len(layers) > 10
    assert (layers[:, 0] != layers[:, -1]).any(), "tokens and layers differ in their routes"
    if kind in SIGMOID:
        for bias in biases(reference).values():
            bias.zero_()
        without = [routes_of(reference, sample.tokens) for sample in samples]
        assert any((a != b).any() for a, b in zip(routes, without, strict=True)), (
            "the bias changes the choice"
        )


@pytest.mark.parametrize("kind", SPARSE)
def test_the_last_selections_are_those_of_a_plain_pass(kind):
    """Of prompts of several lengths, in the positions of their own sequence."""
    reference, engine = build(kind)
    samples = sampled(engine)
    assert len({sample.prompt_length for sample in samples}) > 1
    topk = reference.config.index_topk
    long = [sample for sample in samples if sample.length - 1 > topk]
    assert len(long) > 5
    for sample in long:
        selected = engine.selections[sample.prompt_index, sample.sample_index, sample.length - 2]
        np.testing.assert_array_equal(selected, last_selections(reference, sample.tokens[:-1]))
    engine.update_weights(checkpoint(reference).items(), version=1)
    assert not engine.selections, "they are of other weights"


def last_selections(model, tokens):
    """[layers, topk]: what the last token selects in each layer, ascending."""
    seen = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: seen.append(out[0, -1]))
        for name, module in model.named_modules()
        if name.endswith(".indexer")
    ]
    model(torch.from_numpy(tokens)[None])
    for hook in hooks:
        hook.remove()
    return np.stack([columns.sort().values.numpy() for columns in seen])


def test_small_time_steps_of_a_prompt_are_not_raised():
    """As they are not while a token is decoded, and in the trainer."""
    config = tiny_config("nemotron", vocab_size=VOCABULARY, max_position_embeddings=64)
    reference = reference_model(config, scale=1.5)
    mixers = [module for module in reference.modules() if hasattr(module, "time_step_limit")]
    for mixer in mixers:
        mixer.dt_bias.fill_(-9.0)  # steps of 1e-4
    engine = loaded_engine(config, checkpoint(reference), return_routed_experts=True)
    samples = sampled(engine)
    raised = [teacher_forced(reference, sample) for sample in samples]
    for mixer in mixers:
        mixer.time_step_limit = (0.0, math.inf)
    check(samples, reference)
    errors = [
        abs(sample.rollout_log_probs - other).max()
        for sample, other in zip(samples, raised, strict=True)
    ]
    assert max(errors) > 1e-3, "the limit would show"


@pytest.mark.parametrize("kind", SIGMOID)
def test_a_bias_stays_in_float32_to_the_bit_in_a_bfloat16_engine(kind, tmp_path):
    """Read from files, and sent to an engine of a config."""
    folder = save_tiny_model(tmp_path, kind, dtype=torch.bfloat16)
    family, _ = family_of(read_config(folder))
    with CheckpointReader(folder) as reader:
        tensors = {name: reader.read(name) for name in reader.names}
    read = EmbeddedEngine(folder, dtype=torch.bfloat16)
    sent = EmbeddedEngine(transformers_config(folder), dtype=torch.bfloat16)
    for version, (engine, change) in enumerate(
        ((read, 0.0), (sent, 0.0), (read, 1 / 3), (sent, 1 / 3))
    ):
        stream = {name: value + change * name.endswith(BIAS) for name, value in tensors.items()}
        if version:
            engine.update_weights(stream.items(), version=version)
        loaded = biases(engine.model)
        expected = {
            family.name_in_transformers(name): stream[name]
            for name in stream
            if name.endswith(BIAS)
        }
        assert loaded.keys() == expected.keys() != set()
        for name, bias in loaded.items():
            assert bias.dtype == torch.float32 and torch.equal(bias, expected[name]), name
        assert any(not torch.equal(bias, bias.bfloat16().float()) for bias in loaded.values())
        assert engine.model.lm_head.weight.dtype == torch.bfloat16
        engine.generate(prompts(1), SamplingParams(1, 2), seed=0)


def test_kimi_k2_is_served_as_deepseek_v3(tmp_path):
    """A type that Transformers does not know, with a config of its own code: from files, and
    with weights sent.
    """
    folder = Path(
        save_tiny_model(tmp_path, "deepseek", vocab_size=VOCABULARY, max_position_embeddings=64)
    )
    reference = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    content = json.loads((folder / "config.json").read_text())
    content |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    (folder / "config.json").write_text(json.dumps(content))
    with CheckpointReader(folder) as reader:
        tensors = {name: reader.read(name) for name in reader.names}
    sent = loaded_engine(transformers_config(folder), tensors, return_routed_experts=True)
    for engine in (EmbeddedEngine(folder, return_routed_experts=True), sent):
        check(sampled(engine), reference)
