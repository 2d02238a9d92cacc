from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.embedded.weight_loading import WeightTargets
from tests.support.reference_models import (
    checkpoint,
    dense_config,
    loaded_engine,
    moe_config,
    prompts,
    reference_model,
)
from tests.support.tiny_models import tiny_config

EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def logits(model):
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        return model(ids).logits


def test_a_language_model_that_is_alone_takes_the_names_that_it_has_as_a_part():
    targets = WeightTargets.of(AutoModelForCausalLM.from_config(tiny_config("qwen35_text")))
    new = torch.arange(32.0)
    with suppress(ValueError):  # the others are missing
        targets.write([("model.language_model.norm.weight", new)])
    assert torch.equal(targets.slices["model.norm.weight"], new)


@pytest.mark.parametrize(
    "config",
    [
        moe_config(),
        moe_config(tie_word_embeddings=True),
        moe_config(mlp_only_layers=[0]),
        dense_config(),
        dense_config(tie_word_embeddings=False),
    ],
    ids=["moe", "moe_tied", "moe_dense_layer", "dense_tied", "dense"],
)
def test_an_update_gives_the_reference_model(config):
    engine = loaded_engine(config, checkpoint(reference_model(config, seed=1)))
    reference = reference_model(config, seed=2)
    tensors = checkpoint(reference)
    tied = config.tie_word_embeddings
    if tied:
        del tensors["lm_head.weight"]
    assert set(tensors) - {"lm_head.weight"} == set(engine._targets.slices) - {"lm_head.weight"}
    before = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    engine.update_weights(tensors.items(), version=1)
    assert before == {name: p.data_ptr() for name, p in engine.model.named_parameters()}  # in place
    for name, value in reference.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], value), name
    torch.testing.assert_close(logits(engine.model), logits(reference), atol=2e-5, rtol=1e-5)


def test_other_dtypes_are_converted_and_the_models_own_names_accepted():
    model = reference_model(moe_config(), seed=3)
    engine = loaded_engine(moe_config(), {k: v.double() for k, v in model.state_dict().items()})
    for name, value in model.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], value), name


def test_a_tied_tensor_may_come_if_it_is_equal():
    config = dense_config()
    tensors = checkpoint(reference_model(config))
    engine = loaded_engine(config, dict(reversed(tensors.items())))  # the output weight first
    assert engine.weight_version == 0
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        engine.update_weights(tensors.items(), version=1)


def broken(kind):
    tensors = list(checkpoint(reference_model(moe_config())).items())
    position = [name for name, _ in tensors].index(EXPERT)
    if kind == "missing":
        del tensors[position]
    elif kind == "repeated":
        tensors.append(tensors[position])
    elif kind == "unknown":
        tensors.insert(2, ("model.layers.9.mlp.gate.weight", torch.zeros(8, 32)))
    elif kind == "shape":
        tensors[position] = (EXPERT, tensors[position][1].t())
    elif kind == "fused and split":
        tensors.append(("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 32, 32)))
    return tensors


@pytest.mark.parametrize(
    "kind, message",
    [
        ("missing", f"weight {EXPERT} missing"),
        ("repeated", f"weight {EXPERT} comes twice"),
        ("unknown", "weight model.layers.9.mlp.gate.weight is not in the model"),
        ("shape", f"weight {EXPERT} has shape .32, 16., the model has .16, 32."),
        ("fused and split", "weight model.layers.1.mlp.experts.0.gate_proj.weight comes twice"),
    ],
)
def test_a_wrong_stream_is_read_to_its_end_and_named_in_one_line(kind, message):
    engine = loaded_engine(moe_config(), checkpoint(reference_model(moe_config())))
    read = []

    def stream():
        for name, tensor in broken(kind):
            read.append(name)
            yield name, tensor

    with pytest.raises(ValueError, match="^" + message) as error:
        engine.update_weights(stream(), version=1)
    assert "\n" not in str(error.value)
    assert len(read) == len(broken(kind))
    # Part of it may have been written.
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(prompts(1), SamplingParams(1, 2), seed=0)
    engine.update_weights(broken("none"), version=2)
    assert engine.generate(prompts(1), SamplingParams(1, 2), seed=0)[0].weight_version == 2
