"""INT4 of compressed-tensors by hand and by a loop, and a model whose experts are stored so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from megatron_gspo.models import ModelError, family_of, read_config
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.packed_int4 import dequantized
from tests.support.tiny_models import INT4, save_kimi_model

EXPERT = "language_model.model.layers.1.mlp.experts.0.down_proj.weight"


def by_loop(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Number by number: bits 4 j to 4 j + 3 of a word are its number j, plus 8."""
    rows, columns = words.shape[0], words.shape[1] * 8
    group = columns // scales.shape[1]
    values = torch.empty(rows, columns, dtype=torch.bfloat16)
    for row in range(rows):
        for column in range(columns):
            word = int(words[row, column // 8]) % 2**32
            integer = word // 16 ** (column % 8) % 16 - 8
            values[row, column] = integer * float(scales[row, column // group])
    return values


def dequantised_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory, those in INT4 dequantised by the loop."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_packed")]:
        weight = name.removesuffix("_packed")
        sizes = tensors.pop(f"{weight}_shape").tolist()
        tensors[weight] = by_loop(tensors.pop(name), tensors.pop(f"{weight}_scale"))
        assert list(tensors[weight].shape) == sizes
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "int4"
    return Path(save_kimi_model(folder, dtype=torch.bfloat16, packed=True))


def test_values_by_hand() -> None:
    """0x8F07 has, lowest bits first, 7 - 8, 0 - 8, 15 - 8 and 8 - 8."""
    values = dequantized(torch.tensor([[0x8F07]], dtype=torch.int32), torch.tensor([[0.5]]))
    assert values.dtype == torch.bfloat16
    assert values.tolist() == [[-0.5, -4.0, 3.5, 0.0, -4.0, -4.0, -4.0, -4.0]]


def test_every_tensor_is_that_of_the_loop(source: Path) -> None:
    expected = dequantised_tensors(source)
    with CheckpointReader(source) as reader:
        check_checkpoint(reader, *family_of(read_config(source)))
        assert reader.names == expected.keys()
        assert reader.common_dtype(name for name in expected if "bias" in name) == torch.bfloat16
        for name in expected:
            assert torch.equal(reader.read(name), expected[name]), name
            assert reader.shape(name) == tuple(expected[name].shape)


SLICES = [(0, 8), (5, 29), (31, 32), (16, 16), (3, None)]


@pytest.mark.parametrize(
    ("dim", "start", "stop"),
    [*((dim, *bounds) for dim in (0, 1) for bounds in SLICES), (1, 27, 40), (1, 40, 56)],
)
def test_a_slice_is_that_of_the_whole(source: Path, dim: int, start: int, stop: int | None) -> None:
    """Of a weight with two scales a row."""
    name = EXPERT.replace("down_proj", "gate_proj")
    with CheckpointReader(source) as reader:
        whole = reader.read(name)
        assert whole.shape == (32, 64)
        part = whole[start:stop] if dim == 0 else whole[:, start:stop]
        assert torch.equal(reader.read(name, dim, start, stop), part)


def test_transformers_reads_the_names(tmp_path: Path) -> None:
    """Of the same model without INT4: every tensor is in its place."""
    folder = save_kimi_model(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    text = dict(model.model.language_model.named_parameters())
    with CheckpointReader(folder) as reader:
        norm = "layers.2.input_layernorm.weight"
        assert torch.equal(text[norm], reader.read(f"language_model.model.{norm}"))
        assert torch.equal(model.lm_head.weight, reader.read("language_model.lm_head.weight"))
        down = reader.read("language_model.model.layers.1.mlp.experts.3.down_proj.weight")
        assert torch.equal(text["layers.1.mlp.experts.down_proj"][3], down)


def changed(source: Path, folder: Path, **weights: object) -> Path:
    """The model whose config.json says something else of its INT4 weights."""
    config = json.loads((source / "config.json").read_text())
    group = INT4["config_groups"]["group_0"]
    settings = INT4 | dict(config_groups={"a": {**group, "weights": group["weights"] | weights}})
    config["text_config"]["quantization_config"] = settings
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors"), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "weights",
    [dict(num_bits=8), dict(symmetric=False), dict(actorder="group"), dict(strategy="channel")],
)
def test_another_packing_is_refused(source: Path, tmp_path: Path, weights: dict) -> None:
    folder = changed(source, tmp_path / "model", **weights)
    message = r"quantised by compressed-tensors \('pack-quantized'\); give .* INT4 in groups"
    with CheckpointReader(folder) as reader, pytest.raises(ModelError, match=message):
        check_checkpoint(reader, *family_of(read_config(folder)))


def test_groups_that_are_not_those_of_the_scales_are_refused(source: Path, tmp_path: Path) -> None:
    folder = changed(source, tmp_path / "model", group_size=16)
    message = r"weight_scale is \(\d+, \d+\) .* in groups of 16 columns has a scale for each"
    with CheckpointReader(folder) as reader, pytest.raises(ModelError, match=message):
        check_checkpoint(reader, *family_of(read_config(folder)))
