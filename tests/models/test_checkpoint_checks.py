"""Checkpoints that Transformers would load otherwise, and those of published models that it
loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_gspo.models import ModelError, family_of, read_config
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.families import hugging_face_names, with_value_head
from megatron_gspo.models.hf_checkpoint import INDEX, SINGLE, CheckpointReader, write_checkpoint
from megatron_gspo.models.tensor_sizes import tensor_sizes
from tests.models.test_config_defaults import KINDS
from tests.support.tiny_models import save_tiny_model

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def check(folder: Path) -> None:
    with CheckpointReader(folder) as reader:
        check_checkpoint(reader, *family_of(read_config(folder)))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return Path(save_tiny_model(tmp_path / "model", "dense", tie_word_embeddings=True))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return Path(save_tiny_model(tmp_path / "model", "moe"))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_that_transformers_writes(kind: str, tmp_path: Path) -> None:
    folder = Path(save_tiny_model(tmp_path / "model", kind))
    family, shape = family_of(read_config(folder))
    sizes = dict(tensor_sizes(family, shape))
    assert list(sizes) and set(sizes) == set(hugging_face_names(family, shape))
    with CheckpointReader(folder) as reader:
        assert {name.partition("[")[0] for name in sizes} <= reader.names  # of a stack, its slices
        assert {name: reader.shape(name) for name in sizes} == sizes
        check_checkpoint(reader, family, shape)


def test_tied_embeddings_without_an_output_weight(tied: Path) -> None:
    check(tied)


def test_tied_embeddings_with_the_same_output_weight(tied: Path) -> None:
    """As published Qwen3-0.6B."""
    check(change_tensors(tied, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()})))


@pytest.mark.parametrize("row", [0, 95])
def test_tied_embeddings_with_another_output_weight(row: int, tied: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][row, 3] += 1.0

    change_tensors(tied, change)
    model = AutoModelForCausalLM.from_pretrained(tied)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight), (
        "what Transformers does"
    )
    with pytest.raises(
        ModelError,
        match="tie_word_embeddings=true in config.json, and lm_head.weight is not model.emb",
    ):
        check(tied)
    check(change_config(tied, tie_word_embeddings=False))  # the fix that the message names


def test_tied_embeddings_with_a_smaller_output_weight(tied: Path) -> None:
    change_tensors(tied, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING][:-1].clone()}))
    with pytest.raises(ModelError, match="lm_head.weight is not model.embed_tokens.weight"):
        check(tied)


def test_a_value_model_has_no_use_for_the_output_weight(tied: Path) -> None:
    change_tensors(tied, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1.0}))
    family, shape = family_of(read_config(tied))
    with CheckpointReader(tied) as reader:
        check_checkpoint(reader, family, with_value_head(shape))


def test_an_older_buffer_that_no_model_reads(plain: Path) -> None:
    buffers = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(4)
    }
    change_tensors(plain, lambda tensors: tensors.update(buffers))
    check(plain)
    with CheckpointReader(plain) as reader:
        assert not any("inv_freq" in name for name in reader.names)
        assert reader.common_dtype() is torch.float32


def test_a_single_file_beside_an_index_whose_files_are_not_there(plain: Path) -> None:
    """Transformers reads the single file."""
    (plain / INDEX).write_text(
        json.dumps({"weight_map": {QUERY: "model-00001-of-00002.safetensors"}})
    )
    check(plain)
    with CheckpointReader(plain) as reader:
        assert (
            torch.equal(reader.read(QUERY), load_file(plain / SINGLE)[QUERY])
            and not reader.has_index
        )


def test_a_single_file_beside_another_model_in_shards(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / SINGLE)
    others = ((name, tensor + 1.0) for name, tensor in tensors.items())
    shards = write_checkpoint(tmp_path / "shards", others, source=plain, max_shard_bytes=50_000)
    for file in shards.glob("model*"):
        file.rename(plain / file.name)
    with pytest.raises(
        ModelError, match=f"has {SINGLE}, and {INDEX} places the weights in model-00001"
    ):
        check(plain)
    (plain / SINGLE).unlink()
    check(plain)


def test_an_index_of_the_single_file(plain: Path) -> None:
    names = load_file(plain / SINGLE)
    (plain / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))
    check(plain)


@pytest.mark.parametrize("listed", [True, False])
def test_a_tensor_that_the_index_does_not_place_where_it_is(
    listed: bool, plain: Path, tmp_path: Path
) -> None:
    """Transformers reads every tensor of the files that an index names."""
    tensors = load_file(plain / SINGLE)
    shards = write_checkpoint(
        tmp_path / "shards", tensors.items(), source=plain, max_shard_bytes=50_000
    )
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    other = next(
        file for file in sorted(shards.glob("*.safetensors")) if file.name != weight_map[QUERY]
    )
    name = QUERY if listed else "model.layers.0.extra.weight"
    save_file(load_file(other) | {name: torch.zeros(2)}, other)
    with pytest.raises(ModelError, match=f"holds {name}, which {INDEX} (places in|does not list)"):
        check(shards)


# What the format has in place of one weight.
GPTQ = [QUERY.replace("weight", name) for name in ("qweight", "qzeros", "scales", "g_idx")]
AWQ = GPTQ[:3]
PACKED = [f"{QUERY}_{name}" for name in ("packed", "scale", "shape")]
FOUR_BITS = [QUERY, f"{QUERY}.absmax", f"{QUERY}.quant_state.bitsandbytes__nf4"]


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (GPTQ, dict(quant_method="gptq", bits=4), r"quantised by gptq \('4 bits'\)"),
        (AWQ, None, "quantised by gptq or awq"),
        (PACKED, None, "quantised by compressed-tensors"),
        (FOUR_BITS, None, "quantised by bitsandbytes"),
        (None, dict(quant_method="modelopt", quant_algo="NVFP4"), "quantised by modelopt"),
        (None, dict(quant_method=["a"]), "quantised by"),
        (None, "fp8", "quantization_config='fp8' in config.json is no object"),
    ],
)
def test_a_quantised_source_is_called_one(
    names: list[str] | None, settings: object, message: str, plain: Path
) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[QUERY]
        tensors.update({name: torch.zeros(512, 1, dtype=torch.uint8) for name in names or ()})

    if names is not None:
        change_tensors(plain, quantise)
    if settings is not None:
        change_config(plain, quantization_config=settings)
    with pytest.raises(ModelError, match=message):
        check(plain)


def test_other_weights_that_a_config_names(plain: Path) -> None:
    change_config(plain, transformers_weights="other.safetensors")
    with pytest.raises(
        ModelError,
        match="transformers_weights='other.safetensors' in config.json names other weights",
    ):
        check(plain)
