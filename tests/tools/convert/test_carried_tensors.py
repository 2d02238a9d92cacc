"""Conversions of checkpoints with a bias in float32, layers of multi-token prediction and
weights in 8 bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.models.hf_checkpoint import INDEX, SINGLE, CheckpointReader
from megatron_gspo.tools.convert.carried_tensors import CARRIED
from megatron_gspo.tools.convert.torch_dcp_files import DistributedReader
from tests.support.tiny_models import save_tiny_model
from tests.tools.convert.test_main import run, same_files

LAYOUT = ["--tp", "2", "--ep", "2"]
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Weights in bfloat16, the routers' biases in float32."""
    return Path(
        save_tiny_model(
            tmp_path_factory.mktemp("model") / "plain", "deepseek", dtype=torch.bfloat16
        )
    )


def changed(model: Path, folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    shutil.copytree(model, folder)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", ["deepseek", "moonlight", "glm_lite", "glm", "deepseek_v32"])
def test_the_bias_stays_in_float32_and_files_come_back_byte_by_byte(kind, model, tmp_path):
    if kind != "deepseek":
        model = Path(save_tiny_model(tmp_path / "plain", kind, dtype=torch.bfloat16))
    run("to-megatron", model, tmp_path / "megatron", *LAYOUT, "--verify")
    stored = DistributedReader(tmp_path / "megatron")
    assert stored.dtype("decoder.layers.2.mlp.router.expert_bias") is torch.float32
    assert stored.dtype("decoder.layers.2.mlp.router.weight") is torch.bfloat16
    run("to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    assert same_files(model, tmp_path / "back")
    assert load_file(tmp_path / "back" / SINGLE)[BIAS].dtype is torch.float32
    run("to-hf", tmp_path / "megatron", tmp_path / "half", "--dtype", "float16")
    kinds = {name: value.dtype for name, value in load_file(tmp_path / "half" / SINGLE).items()}
    assert kinds.pop(BIAS) is torch.float32 and torch.float16 in kinds.values()


def assert_holds(folder, expected):
    """The checkpoint has these tensors, each of its type and to the bit, and no others."""
    with CheckpointReader(folder) as reader:
        assert reader.names == set(expected)
        for name, tensor in expected.items():
            read_back = reader.read(name)
            assert read_back.dtype == tensor.dtype and torch.equal(read_back, tensor), name


def mtp_layer() -> dict[str, torch.Tensor]:
    """Some tensors of a fifth layer, which the model does not have."""
    g = torch.Generator().manual_seed(1)
    names = {
        "eh_proj.weight": (32, 64),
        "enorm.weight": (32,),
        "mlp.experts.3.up_proj.weight": (16, 32),
    }
    tensors = {name: torch.randn(size, generator=g).bfloat16() for name, size in names.items()}
    tensors["mlp.gate.e_score_correction_bias"] = torch.randn(8, generator=g)
    return {f"model.layers.4.{name}": tensor for name, tensor in tensors.items()}


def test_layers_of_multi_token_prediction_come_back_unchanged(model, tmp_path):
    carried = mtp_layer()
    tensors = load_file(model / SINGLE) | carried
    source = changed(model, tmp_path / "source", tensors, num_nextn_predict_layers=1)
    run("to-megatron", source, tmp_path / "megatron", *LAYOUT, "--verify")
    run("to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    weight_map = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert {name for name, file in weight_map.items() if file == CARRIED} == set(carried)
    assert_holds(tmp_path / "back", tensors)
    assert not (tmp_path / "back" / SINGLE).exists()  # Transformers would read that file alone
    file = tmp_path / "megatron" / "hf" / CARRIED
    damaged = load_file(file)
    damaged["model.layers.4.enorm.weight"][3] += 1
    save_file(damaged, file)
    with pytest.raises(SystemExit):
        run("verify", source, tmp_path / "megatron")


def in_8_bits(name: str, tensor: torch.Tensor) -> bool:
    """As DeepSeek's files have it: projections, of an indexer those of its queries and keys."""
    is_indexer = ".indexer." in name
    wanted = (".wq_b.", ".wk.") if is_indexer else ("_proj",)
    return tensor.dim() == 2 and any(part in name for part in wanted)


@pytest.mark.parametrize("kind", ["deepseek", "deepseek_v32"])
def test_weights_in_8_bits_are_read_as_their_dequantized_values(kind, model, tmp_path):
    """Blocks of 16 x 8, which do not divide every tensor; scales of each by a loop over its
    rows. Those of multi-token prediction are carried as these values."""
    if kind != "deepseek":
        model = Path(save_tiny_model(tmp_path / "plain", kind, dtype=torch.bfloat16))
    quantized = {}
    expected = {}
    carried = mtp_layer()
    for name, tensor in (load_file(model / SINGLE) | carried).items():
        quantized[name] = expected[name] = tensor
        if in_8_bits(name, tensor):
            rows, columns = tensor.shape
            g = torch.Generator().manual_seed(rows)
            scales = torch.rand(-(-rows // 16), -(-columns // 8), generator=g) + 0.01
            quantized[name] = (tensor.float() * 20).to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scales
            values = quantized[name].float()
            for i in range(rows):
                values[i] *= scales[i // 16].repeat_interleave(8)[:columns]
            expected[name] = values.bfloat16()
    indexers = [name for name in quantized if ".indexer." in name and name.endswith("_scale_inv")]
    assert len(indexers) == (2 * 4 if kind == "deepseek_v32" else 0)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    assert sum(f"{name}_scale_inv" in quantized for name in carried) == 2
    source = changed(
        model,
        tmp_path / "source",
        quantized,
        quantization_config=settings,
        num_nextn_predict_layers=1,
    )
    with CheckpointReader(source) as reader:
        assert reader.names == set(expected)
        for name, value in expected.items():
            assert torch.equal(reader.read(name), value), name
            if value.dim() == 2:
                for dim, start, stop in ((0, 3, 21), (1, 5, 13)):
                    chunk = value[start:stop] if dim == 0 else value[:, start:stop]
                    assert torch.equal(reader.read(name, dim, start, stop), chunk), name
    run("to-megatron", source, tmp_path / "megatron", *LAYOUT, "--verify")
    run("to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    assert_holds(tmp_path / "back", expected)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    with CheckpointReader(source) as reader, CheckpointReader(tmp_path / "back") as other:
        assert all(torch.equal(reader.read(name), other.read(name)) for name in reader.names)


@pytest.mark.parametrize(
    "kind, carried, config",
    [
        ("next", {"mtp.fc.weight": (32, 64), "mtp.norm": (3,)}, {}),
        # Five blocks of rows, each cut by two; layers of half a kind; biases in float32.
        ("nemotron", {"mtp.layers.0.eh_proj.weight": (32, 64)}, {"num_nextn_predict_layers": 1}),
        # Norms over all heads, cut by two; biases in float32.
        ("minimax", {"model.layers.4.eh_proj.weight": (32, 64)}, {"num_mtp_modules": 1}),
    ],
)
def test_a_family_comes_back_byte_by_byte_with_its_multi_token_prediction(
    kind, carried, config, tmp_path
):
    plain = Path(save_tiny_model(tmp_path / "plain", kind, dtype=torch.bfloat16))
    run("to-megatron", plain, tmp_path / "one", "--tp", "2", "--pp", "2", "--verify")
    run("to-hf", tmp_path / "one", tmp_path / "same", "--verify")
    assert same_files(plain, tmp_path / "same")
    tensors = load_file(plain / SINGLE)
    tensors |= {name: torch.randn(size).bfloat16() for name, size in carried.items()}
    source = changed(plain, tmp_path / "source", tensors, **config)
    run("to-megatron", source, tmp_path / "megatron", *LAYOUT, "--verify")
    run("to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    assert_holds(tmp_path / "back", tensors)


@pytest.mark.parametrize("kind", ["qwen35_moe", "qwen35", "qwen35_moe_text"])
def test_a_language_model_comes_back_byte_by_byte_with_its_vision_and_multi_token_prediction(
    kind, tmp_path
):
    """As Qwen3.5 is published: bfloat16, decay rates and the norm behind them in float32."""
    plain = Path(save_tiny_model(tmp_path / "plain", kind, dtype=torch.bfloat16))
    g = torch.Generator().manual_seed(2)
    tensors = load_file(plain / SINGLE)
    for name in [name for name in tensors if name.endswith(("A_log", "linear_attn.norm.weight"))]:
        tensors[name] = torch.randn(tensors[name].shape, generator=g)
    source = changed(plain, tmp_path / "source", tensors)
    run("to-megatron", source, tmp_path / "one", "--tp", "2", "--pp", "2", "--verify")
    run("to-hf", tmp_path / "one", tmp_path / "same", "--verify")
    with CheckpointReader(tmp_path / "same") as reader:
        assert all(reader.read(name).dtype == tensor.dtype for name, tensor in tensors.items())
    tensors |= {
        "mtp.fc.weight": torch.randn(32, 64, generator=g).bfloat16(),
        "mtp.norm.weight": torch.ones(3),
    }
    source = changed(plain, tmp_path / "with mtp", tensors)
    expert = ["--ep", "2", "--etp", "2"] if "moe" in kind else []
    run("to-megatron", source, tmp_path / "megatron", "--tp", "2", *expert, "--verify")
    run("to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    assert_holds(tmp_path / "back", tensors)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
