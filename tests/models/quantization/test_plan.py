"""Streams in eight bits and back, and checkpoints that Transformers reads."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.hf_checkpoint import CheckpointReader, write_checkpoint
from megatron_gspo.models.quantization.formats import FORMATS, dequantize_blocks, quantize_blocks
from megatron_gspo.models.quantization.plan import QuantizationPlan, dequantized, quantization_plan
from tests.support.tiny_models import save_tiny_model

MODULES = ("model.layers.*.self_attn.*", "model.layers.*.mlp.experts.*.*")
EXCLUDE = ("lm_head", "model.layers.*.mlp.gate", "model.layers.3.mlp.experts.*.*")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a Qwen3-MoE in bfloat16 whose weights are whole blocks."""
    return save_tiny_model(
        tmp_path_factory.mktemp("model") / "hf",
        dtype=torch.bfloat16,
        hidden_size=256,
        moe_intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=2,
    )


def plan_of(model: str, name: str = "fp8_block") -> QuantizationPlan:
    return quantization_plan(name, MODULES, EXCLUDE, *family_of(read_config(model)))


def tensors_of(model: str) -> list[tuple[str, torch.Tensor]]:
    with CheckpointReader(model) as reader:
        return [(name, reader.read(name)) for name in sorted(reader.names)]


@pytest.mark.parametrize("name", FORMATS)
def test_listed_weights_leave_in_eight_bits_and_the_others_as_they_are(model, name):
    plan = plan_of(model, name)
    each = FORMATS[name]
    sent = list(plan.quantize(tensors_of(model)))
    names = [sent_name for sent_name, _ in sent]
    assert len(names) == len(set(names))
    values = dict(sent)
    for weight, tensor in tensors_of(model):
        listed = (
            ".self_attn." in weight
            and "norm" not in weight
            or ".experts." in weight
            and "layers.3." not in weight
        )
        if not listed:
            assert values[weight] is not None and torch.equal(values[weight], tensor)
            continue
        expected = each.quantize(tensor)
        scale = values[weight + each.scale]
        assert torch.equal(values[weight].view(torch.uint8), expected[0].view(torch.uint8))
        assert (
            torch.equal(scale, expected[1])
            and names[names.index(weight) + 1] == weight + each.scale
        )
    assert (
        sum(tensor.element_size() == 1 for tensor in values.values())
        == len(plan.modules)
        == 4 * 4 + 3 * 2 * 3
    )


@pytest.mark.parametrize("name", FORMATS)
def test_the_way_back_has_every_tensor_once(model, name):
    plan = plan_of(model, name)
    each = FORMATS[name]
    restored = list(dequantized(plan.quantize(tensors_of(model))))
    assert [weight for weight, _ in restored] == [weight for weight, _ in tensors_of(model)]
    for (weight, tensor), (_, exact) in zip(restored, tensors_of(model), strict=True):
        quantised = weight.removesuffix(".weight") in plan.modules
        assert torch.equal(tensor, each.dequantize(*each.quantize(exact)) if quantised else exact)


def test_one_tensor_at_a_time():
    """The stream is not read ahead of its consumer."""
    read: list[int] = []

    def stream():
        for number in range(3):
            read.append(number)
            yield f"a.{number}.weight", torch.ones(4, 4)

    plan = QuantizationPlan(FORMATS["int8"], frozenset({"a.0", "a.1", "a.2"}), ())
    quantized = plan.quantize(stream())
    for number in range(3):
        assert next(quantized)[0] == f"a.{number}.weight" and read[-1] == number
        assert next(quantized)[0] == f"a.{number}.weight_scale" and read[-1] == number


@pytest.mark.parametrize("following", [[("b.weight", torch.ones(1))], []], ids=["another", "none"])
def test_values_without_their_scales_are_refused_at_the_end_of_the_stream(following):
    read = []

    def stream():
        for name, tensor in [
            ("a.weight", torch.ones(1, 1, dtype=torch.int8)),
            *following,
            *following,
        ]:
            read.append(name)
            yield name, tensor

    with pytest.raises(ValueError, match=r"weight a\.weight is quantised and "):
        list(dequantized(stream()))
    assert len(read) == 1 + 2 * len(following)


def test_transformers_loads_block_fp8(model, tmp_path):
    """`from_pretrained` dequantises what is listed, to the bfloat16 of our own formula, and
    nothing else.
    """
    plan = plan_of(model)
    out = write_checkpoint(
        tmp_path / "fp8", plan.quantize(tensors_of(model)), source=model, quantization=plan.config
    )
    config = json.loads((out / "config.json").read_text())
    assert (
        config["quantization_config"]["weight_block_size"] == [128, 128]
        and config["dtype"] == "bfloat16"
    )
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert kept == [
        *(f"model.layers.{layer}.mlp.gate" for layer in range(3)),
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.experts",
        "lm_head",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    assert loaded.keys() == exact.keys()
    for name, tensor in exact.items():
        kind = name.rpartition(".")[2]
        if "experts" in name and "layers.3." not in name:
            parts = [
                matrix
                for each in tensor
                for matrix in (each.chunk(2) if kind == "gate_up_proj" else [each])
            ]
            expected = torch.cat(
                [dequantize_blocks(*quantize_blocks(matrix)).bfloat16() for matrix in parts]
            )
            expected = expected.view_as(tensor)
        elif "self_attn" in name and "norm" not in name:
            expected = dequantize_blocks(*quantize_blocks(tensor)).bfloat16()
        else:
            expected = tensor
        assert torch.equal(loaded[name], expected), name


def test_our_reader_reads_block_fp8(model, tmp_path):
    plan = plan_of(model)
    out = write_checkpoint(
        tmp_path / "fp8", plan.quantize(tensors_of(model)), source=model, quantization=plan.config
    )
    with CheckpointReader(out) as reader:
        reader.check()
        assert reader.names == {name for name, _ in tensors_of(model)}
        for name, tensor in dequantized(plan.quantize(tensors_of(model))):
            assert torch.equal(reader.read(name), tensor.bfloat16())
