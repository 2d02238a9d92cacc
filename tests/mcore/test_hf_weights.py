"""Weights into Megatron's shards and out again, bit for bit, in every layout and under both
layer specs' names.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.hf_weights import export_weights, load_weights, map_parameters
from megatron_gspo.mcore.model import build_model
from megatron_gspo.models import family_of, read_config
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.live_storages import LiveStorages
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_mxfp4_model, save_tiny_model, stored_tensors

CASES = [
    ("moe", parallel()),
    ("moe", parallel(tensor=2)),
    ("moe", parallel(expert=2)),
    ("moe", parallel(pipeline=2)),
    ("moe", parallel(pipeline=2, virtual_pipeline=2)),
    ("moe", parallel(pipeline=2, virtual_pipeline=3, embedding_as_layer=True, loss_as_layer=True)),
    ("moe", parallel(tensor=2, expert=2)),
    ("moe", parallel(tensor=2, expert_tensor=2)),
    ("moe", parallel(expert_tensor=2)),
    ("mixed", parallel(pipeline=2)),
    ("mixed", parallel(expert=2)),
    ("dense", parallel(tensor=2)),
    ("dense", parallel(pipeline=2)),
    ("shared", parallel(tensor=2, expert=2)),
    ("shared", parallel(pipeline=2)),
    ("gpt_oss", parallel()),
    ("gpt_oss", parallel(tensor=2, expert=2)),
    ("gpt_oss", parallel(tensor=2, expert_tensor=2)),
    ("gpt_oss", parallel(pipeline=2)),
    ("mxfp4", parallel(tensor=2, expert_tensor=2)),
    ("tied", parallel()),
    ("tied", parallel(tensor=2)),
    ("tied", parallel(pipeline=2)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """95 tokens: an odd vocabulary, which two tensor-parallel ranks pad."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "moe": save_tiny_model(folder / "moe", vocab_size=95),
        "mixed": save_tiny_model(folder / "mixed", mlp_only_layers=[1]),
        "shared": save_tiny_model(folder / "shared", "shared"),
        "gpt_oss": save_tiny_model(folder / "gpt_oss", "gpt_oss"),
        "mxfp4": save_mxfp4_model(folder / "mxfp4"),
        "dense": save_tiny_model(folder / "dense", "dense"),
        "tied": save_tiny_model(folder / "tied", "dense", vocab_size=95, tie_word_embeddings=True),
    }


def differences(path: str, exported: dict[str, torch.Tensor]) -> list[str]:
    """Names that one side lacks or whose tensors aren't bit-equal."""
    expected = stored_tensors(path)
    return [
        n
        for n in {*expected, *exported}
        if n not in expected
        or n not in exported
        or not torch.equal(expected[n].to(exported[n].dtype), exported[n])
    ]


def round_trips(rank: int, world_size: int, models: dict[str, str]) -> dict[str, list[str]]:
    trips = {}
    for kind, layout in CASES:
        groups = groups_of(layout)
        family, shape = family_of(read_config(models[kind]))
        chunks = build_model(shape, layout, model_config(), groups)
        load_weights(chunks, models[kind], family, shape, groups)
        trips[f"{kind} {layout}"] = []
        for options in ({}, {"piece": 3000}):  # a layer at once, and in many pieces
            names: list[str] = []
            exported = {}
            for name, tensor in export_weights(chunks, family, shape, groups, **options):
                names.append(name)
                exported[name] = tensor.clone()
            twice = ["a name came twice"] if len(exported) < len(names) else []
            trips[f"{kind} {layout}"] += differences(models[kind], exported) + twice
    return trips


def test_export_is_what_was_loaded_on_every_rank(models):
    for trips in run_distributed(round_trips, 2, models):
        assert len(trips) == len(CASES)
        for case, different in trips.items():
            assert different == [], f"{case}: {different[:3]}"


def memory_of_the_stream(
    rank: int, world_size: int, path: str, layout: ParallelConfig
) -> tuple[int, int, int]:
    """Bytes: the most that the stream holds at once, the largest parameter's whole ones, all."""
    groups = groups_of(layout)
    family, shape = family_of(read_config(path))
    chunks = build_model(shape, layout, model_config(), groups)
    total = 0
    largest = 2 * max(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    with LiveStorages() as live:
        for _, tensor in export_weights(chunks, family, shape, groups, piece=8192):
            total += tensor.nbytes
    return live.peak, largest, total


@pytest.mark.parametrize(
    "layout", [parallel(tensor=2, expert=2), parallel(pipeline=2)], ids=["tp2 ep2", "pp2"]
)
def test_a_stream_holds_little(models, layout):
    for peak, largest, total in run_distributed(memory_of_the_stream, 2, models["moe"], layout):
        bound = 3 * max(8192, largest)
        assert 0 < peak <= bound < total / 2


def _with_engine_names(chunk: Any, family: Any, shape: Any, groups: Any) -> torch.nn.Module:
    """The chunk's parameters under the names of Transformer Engine's layer spec, each rule's
    first.
    """
    root = torch.nn.Module()
    root.decoder = torch.nn.Module()
    root.decoder.layers = torch.nn.ModuleList(torch.nn.Module() for _ in chunk.decoder.layers)
    for ours, theirs in zip(root.decoder.layers, chunk.decoder.layers, strict=True):
        ours.layer_number = theirs.layer_number
    step = max(shape.num_experts // groups.ep.size(), 1)
    for placed in list(map_parameters(chunk, family, shape, groups)):
        owner = root if placed.layer < 0 else root.decoder.layers[placed.layer]
        *path, last = placed.rule.megatron[0].format(expert=placed.expert % step).split(".")
        for component in path:
            if not hasattr(owner, component):
                owner.add_module(component, torch.nn.Module())
            owner = getattr(owner, component)
        owner.register_parameter(last, torch.nn.Parameter(torch.zeros_like(placed.parameter)))
    return root


def engine_names(rank: int, world_size: int, models: dict[str, str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    layout = parallel(expert=2)
    groups = groups_of(layout)
    for kind in ("moe", "mixed"):
        family, shape = family_of(read_config(models[kind]))
        chunk = _with_engine_names(
            build_model(shape, layout, model_config(), groups)[0], family, shape, groups
        )
        load_weights([chunk], models[kind], family, shape, groups)
        exported = {
            name: tensor.clone() for name, tensor in export_weights([chunk], family, shape, groups)
        }
        names[kind] = (
            differences(models[kind], exported),
            sorted(name for name, _ in chunk.named_parameters()),
        )
    return names


def test_names_of_the_transformer_engine_spec(models):
    engine = run_distributed(engine_names, 2, models)[1]
    for kind in ("moe", "mixed"):
        assert engine[kind][0] == []
    names = engine["mixed"][1]
    for name in (
        "0.self_attention.linear_qkv.layer_norm_weight",
        "1.mlp.linear_fc1.layer_norm_weight",
        "0.pre_mlp_layernorm.weight",
        "0.mlp.experts.linear_fc1.weight3",
    ):
        assert f"decoder.layers.{name}" in names


def failures(rank: int, world_size: int, paths: dict[str, str]) -> dict[str, str]:
    """The message of loading each broken checkpoint under tensor parallelism."""
    layout = parallel(tensor=2)
    groups = groups_of(layout)
    messages = {}
    for key, path in paths.items():
        family, shape = family_of(read_config(path))
        chunks = build_model(shape, layout, model_config(), groups)
        with pytest.raises(ValueError) as caught:
            load_weights(chunks, path, family, shape, groups)
        messages[key] = str(caught.value)
    chunks[0].extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError) as caught:
        list(map_parameters(chunks[0], family, shape, groups))
    return {**messages, "unknown parameter": str(caught.value)}


def test_broken_checkpoints_name_the_tensor(models, tmp_path):
    whole = load_file(Path(models["moe"]) / "model.safetensors")
    query = "model.layers.2.self_attn.q_proj.weight"
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    variants = {
        "missing": {name: tensor for name, tensor in whole.items() if name != expert},
        "extra": {**whole, "model.layers.7.mlp.gate.weight": torch.zeros(1)},
        "short query": {**whole, query: whole[query][:32].clone()},
        "expert": {**whole, expert: whole[expert][:, :8].clone()},
        "small vocabulary": {**whole, "lm_head.weight": whole["lm_head.weight"][:90].clone()},
        "large vocabulary": {**whole, "model.embed_tokens.weight": torch.zeros(200, 32)},
        "norm": {**whole, "model.norm.weight": torch.ones(16)},
    }
    for key, tensors in variants.items():
        shutil.copytree(models["moe"], tmp_path / key)
        save_file(tensors, tmp_path / key / "model.safetensors")
    expected = {
        "missing": f"lacks {expert} (1 missing)",
        "extra": "has model.layers.7.mlp.gate.weight",
        "short query": f"{query} is (32, 32) in the checkpoint; config.json makes it (64, 32)",
        "expert": f"{expert} is (32, 8)",
        "small vocabulary": (
            "lm_head.weight is (90, 32) in the checkpoint; config.json makes it (95, 32)"
        ),
        "large vocabulary": "model.embed_tokens.weight is (200, 32)",
        "norm": "model.norm.weight is (16,)",
        "unknown parameter": "no rule of family qwen3_moe matches the Megatron parameter extra",
    }
    for messages in run_distributed(failures, 2, {key: str(tmp_path / key) for key in variants}):
        for key, message in expected.items():
            assert message in messages[key]
