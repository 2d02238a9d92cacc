"""A config.json, index or header that anyone may have written ends in one line, and soon."""

from __future__ import annotations

import copy
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.model_checks import check_family, read_hf_config
from megatron_gspo.models import ModelError, family_of, read_config
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.hf_checkpoint import INDEX, SINGLE, CheckpointReader
from megatron_gspo.models.model_shape import read_json
from tests.models.test_config_defaults import KINDS, language_keys
from tests.support.tiny_models import save_tiny_model, tiny_config

VALUES: tuple[object, ...] = (
    [],
    ["a"],
    [["a"]],
    {},
    {"a": 1},
    "a",
    "",
    True,
    0,
    -1,
    1.5,
    10**9,
    10**400,
    float("nan"),
    float("inf"),
    1e-300,
)
IN_ROPE = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def ends_well(config: dict[str, Any]) -> None:
    """The config is taken or refused in one line, without much memory or time."""
    started = time.process_time()
    try:
        family_of(config)
    except ModelError as error:
        text = str(error)
        assert "\n" not in text and len(text) < 1000, text
    assert time.process_time() - started < 5


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_of_any_key_ends_in_one_line(kind: str) -> None:
    config = tiny_config(kind).to_dict()
    keys = [
        *language_keys(config),
        "rope_scaling",
        "use_qk_norm",
        "scoring_func",
        "rotary_dim",
        "num_nextn_predict_layers",
    ]
    for key in keys:
        for value in VALUES:
            changed = copy.deepcopy(config)
            language_keys(changed)[key] = value
            ends_well(changed)
    for key in IN_ROPE:
        for value in VALUES:
            for kind_of_rope in ("default", "yarn"):
                changed = copy.deepcopy(config)
                language_keys(changed)["rope_parameters"] = {
                    "rope_type": kind_of_rope,
                    "factor": 2.0,
                    key: value,
                }
                ends_well(changed)
    for value in VALUES:
        for key in ("model_type", "text_config"):
            ends_well(config | {key: value})


@pytest.mark.parametrize("value", [["qwen3"], {"a": 1}, None, 7, "x" * 10**6])
def test_a_model_type_that_is_no_text(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config("moe").to_dict() | {"model_type": value})
    )
    with pytest.raises(ConfigError) as caught:
        check_family("model.path", str(tmp_path), read_hf_config(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError):
        family_of(read_config(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "too many brackets"),
        (b"[" * 1_000_000, "too many brackets"),
        (b'{"a": "\xff\xfe"}', "can't decode"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "Exceeds the limit"),
        (b'{"a": 1, "b": 3, "a": 2}', "a has two values"),
        (b'{"x": {"a": 1, "a": 2}}', "a has two values"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"", "Expecting value"),
    ],
)
def test_json_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    for name in ("config.json", INDEX):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ModelError, match=message) as caught:
            read_json(file)
        assert name in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match="its config.json is not a JSON object"):
        read_hf_config(tmp_path)


def test_a_key_with_one_value_twice_is_that_value(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1, "a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}


def test_a_file_too_large_for_json(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(10 << 30)
    with pytest.raises(ModelError, match="more than 64 MiB"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=10**9), "hidden_size=1000000000 in config.json is no model's size"),
        (
            dict(vocab_size=97),
            r"embed_tokens.weight is \(96, 32\) in the checkpoint; config.json makes it \(97, 32\)",
        ),
        (dict(num_hidden_layers=4000), "checkpoint lacks model.layers.10.input_layernorm.weight"),
        (dict(num_experts=10**6, num_hidden_layers=1), "1000000 experts in each of 1 layers"),
        (
            dict(moe_intermediate_size=4_000_000),
            "in the checkpoint; config.json makes it .*4000000",
        ),
    ],
)
def test_sizes_are_compared_with_the_headers(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    folder = Path(save_tiny_model(tmp_path / "model", "moe"))
    content = json.loads((folder / "config.json").read_text()) | changes
    if "num_experts" in changes:
        del content["num_local_experts"]
    (folder / "config.json").write_text(json.dumps(content))
    started = time.process_time()
    with pytest.raises(ModelError, match=message), CheckpointReader(folder) as reader:
        check_checkpoint(reader, *family_of(read_config(folder)))
    assert time.process_time() - started < 5


def header(folder: Path, text: bytes, length: int | None = None, data: bytes = b"") -> None:
    (folder / SINGLE).write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + data
    )


def entry(begin: int, end: int, shape: list[int]) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (b"{}", 2**63),
        (b"{}", 99_999_999),
        (b"{" * 1000, None),
        (b"\xff" * 8, None),
        (json.dumps({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}).encode(), None),
        (json.dumps({"a": entry(0, 8, [2**63, 2**63])}).encode(), None),
    ],
)
def test_a_hostile_header_ends_in_one_line(text: bytes, length: int | None, tmp_path: Path) -> None:
    header(tmp_path, text, length, b"\0" * 12)
    with pytest.raises(ModelError, match="damaged or cut short") as caught:
        CheckpointReader(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": ["x"]}}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": {"a": "../other.safetensors"}}, "no safetensors file there"),
        ({"weight_map": {"a": "x.bin"}}, "no safetensors file there"),
    ],
)
def test_a_hostile_index_ends_in_one_line(index: object, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("block", "scales", "message"),
    [
        *(([value], (1, 1), "weight_block_size") for value in (128, "128", 1.5)),
        ([0, 0], (1, 1), "weight_block_size"),
        ([1.5, 2], (1, 1), "weight_block_size"),
        (None, (), "q_proj.weight_scale_inv is .* has scales of"),
    ],
)
def test_blocks_of_scales_that_are_none(
    block: object, scales: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    folder = Path(save_tiny_model(tmp_path / "model", "moe"))
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(folder / SINGLE)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(scales)
    save_file(tensors, folder / SINGLE)
    if block is not None:
        settings = {"quant_method": "fp8", "weight_block_size": block}
        content = json.loads((folder / "config.json").read_text())
        content["quantization_config"] = settings
        (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message), CheckpointReader(folder) as reader:
        check_checkpoint(reader, *family_of(read_config(folder)))
