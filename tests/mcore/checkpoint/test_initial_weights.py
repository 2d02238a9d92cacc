"""Weights from checkpoints that unmodified megatron-core saved, and our checkpoints loaded there."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from megatron_gspo.config import ParallelConfig
from megatron_gspo.errors import ModelError
from megatron_gspo.mcore.checkpoint.initial_weights import check_layers_are_megatrons
from megatron_gspo.mcore.checkpoint.metadata_file import METADATA
from megatron_gspo.mcore.checkpoint.save_load import save_checkpoint
from megatron_gspo.mcore.checkpoint.stored_keys import Place, stored_place
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.models import family_of
from megatron_gspo.models.megatron_folders import TRACKER, iteration_folder
from tests.support.configs import adam, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.megatron_models import megatron_model
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model, tiny_config

ONE = ParallelConfig()
# The model's config.json for a kind of Megatron's.
KINDS = {"dense": "dense", "moe": "moe", "numbered": "moe", "deepseek": "deepseek"}
SAVED = parallel(tensor=2, expert=2)
LOADED = {
    "dense": parallel(tensor=2),
    "moe": parallel(expert=2),
    "numbered": parallel(pipeline=2),
    "deepseek": parallel(pipeline=2),
}


def model_folder(folder: Path, kind: str, **sizes: object) -> str:
    """Config of the model, without weights."""
    path = Path(save_tiny_model(folder / "model", KINDS[kind], **sizes))
    (path / "model.safetensors").unlink()
    return str(path)


def save_there(rank: int, world_size: int, kind: str, layout: ParallelConfig, path: str) -> None:
    groups_of(layout)
    model = megatron_model(kind, layout)
    Path(path).mkdir(exist_ok=True)
    content = {"model": model.sharded_state_dict(), "iteration": 7, "args": {"lr": 1.0}}
    dist_checkpointing.save(content, path)


def policy_from(path: str, checkpoint: str, layout: ParallelConfig) -> Policy:
    config = model_config(path, megatron_path=checkpoint)
    return build_policy(config, layout, groups_of(layout), optimizer=None)


def load_in_one(
    rank: int, world_size: int, kind: str, path: str, checkpoint: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """In one piece: Megatron's own parameters as its own loader fills them, ours, and what is
    exported."""
    policy = policy_from(path, checkpoint, ONE)
    there = megatron_model(kind, ONE)
    there.load_state_dict(
        dist_checkpointing.load({"model": there.sharded_state_dict()}, checkpoint)["model"]
    )
    parts = (there, policy.chunks[0])
    values = [
        {
            name: value.clone()
            for name, value in part.state_dict().items()
            if isinstance(value, Tensor)
        }
        for part in parts
    ]
    return values[0], values[1], {name: value.clone() for name, value in policy.weights()}


def load_in(
    rank: int, world_size: int, path: str, checkpoint: str, layout: ParallelConfig
) -> dict[str, Tensor]:
    weights = policy_from(path, checkpoint, layout).weights()
    return {name: value.clone() for name, value in weights}


@pytest.mark.parametrize("kind", KINDS)
def test_what_megatron_saved_is_loaded_in_any_layout(kind: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path, kind)
    checkpoint = tmp_path / "iter_0000007"
    saved = parallel(tensor=2) if kind == "dense" else SAVED
    run_distributed(save_there, 2, kind, saved, str(checkpoint))
    [(theirs, ours, exported)] = run_distributed(load_in_one, 1, kind, path, str(checkpoint))
    assert {name: value.shape for name, value in ours.items()} == {
        name: value[: ours[name].shape[0]].shape for name, value in theirs.items()
    }
    for name, value in ours.items():  # Megatron pads the vocabulary more
        assert torch.equal(value, theirs[name][: value.shape[0]]), name
    (tmp_path / TRACKER).write_text("7\n")
    for weights in run_distributed(load_in, 2, path, str(tmp_path), LOADED[kind]):
        assert weights.keys() == exported.keys()
        assert all(torch.equal(weights[name], exported[name]) for name in exported)


def fail(rank: int, world_size: int, path: str, checkpoint: str) -> str:
    with pytest.raises(ModelError) as error:
        policy_from(path, checkpoint, ONE)
    return str(error.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(hidden_size=64), r"word_embeddings.weight is \[128, 32\] there and \[96, 64\]"),
        (dict(vocab_size=200), r"word_embeddings.weight is \[128, 32\] there, .* 200 tokens"),
        (dict(num_hidden_layers=3), r"is \[4, \d+.*\] there and \[3, \d+"),
        (dict(mlp_only_layers=[1]), "it has no decoder.layers.1.mlp.linear_fc1.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = model_folder(tmp_path, "moe", **sizes)
    run_distributed(save_there, 1, "moe", ONE, str(tmp_path / "checkpoint"))
    [text] = run_distributed(fail, 1, path, str(tmp_path / "checkpoint"))
    assert text.startswith(f"model.megatron_path={tmp_path / 'checkpoint'}: ")
    assert "\n" not in text and re.search(message, text)


def test_weights_that_the_model_does_not_use_are_refused(tmp_path: Path) -> None:
    """A checkpoint with experts, for a config with a dense second layer and the layer's weights."""
    path = model_folder(tmp_path, "moe", num_hidden_layers=3)
    run_distributed(save_there, 1, "numbered", ONE, str(tmp_path / "checkpoint"))
    [text] = run_distributed(fail, 1, path, str(tmp_path / "checkpoint"))
    assert re.search(r"has decoder\.layers\.3\.\S+, which the model of config.json", text)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code ran')",)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    path = model_folder(tmp_path, "moe")
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    [text] = run_distributed(fail, 1, path, str(tmp_path))
    assert "not readable as a checkpoint's metadata (it names builtins.exec" in text


def load_ours_there(
    rank: int, world_size: int, kind: str, path: str, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A run's checkpoint, saved in two pieces, in Megatron's own model. Its torch layers have
    another key for the norm before experts than with Transformer Engine, which ours is."""
    layout = parallel(tensor=2)
    policy = build_policy(
        model_config(path), layout, groups_of(layout), optimizer=adam(lr=1e-3), total_steps=1
    )
    at = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    there = megatron_model(kind, layout, vocabulary=96)
    wanted = there.sharded_state_dict()
    for value in wanted.values() if kind != "dense" else ():
        value.key = value.key.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")
    there.load_state_dict(dist_checkpointing.load({"model": wanted}, str(at))["model"])
    ours = policy.chunks[0].module
    return tuple(
        {name: v.clone() for name, v in part.state_dict().items() if isinstance(v, Tensor)}
        for part in (ours, there)
    )


@pytest.mark.parametrize("kind", ["dense", "numbered"])
def test_megatron_loads_what_a_run_saved(kind: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", KINDS[kind])
    for ours, theirs in run_distributed(load_ours_there, 2, kind, path, str(tmp_path / "run")):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_layers_that_megatron_stores_otherwise_are_refused() -> None:
    for kind in ("next", "minimax", "nemotron"):
        _, shape = family_of(tiny_config(kind).to_dict())
        with pytest.raises(ModelError, match="are not stored as Megatron-Core's; give the weights"):
            check_layers_are_megatrons(shape)


def test_keys_of_numbered_and_of_stacked_layers_are_found() -> None:
    numbered = Place("decoder.layers.2.mlp.a", (6, 5), Box((3, 0), (3, 5)))
    stacked = Place("decoder.layers.mlp.a", (4, 6, 5), Box((2, 3, 0), (1, 3, 5)))
    assert stored_place(numbered, {stacked.key: ()}, 4) == stacked
    assert stored_place(stacked, {numbered.key: ()}, 4) == numbered
    assert stored_place(numbered, {}, 4) == numbered
    norm = Place("decoder.layers.2.pre_mlp_layernorm.weight", (5,), Box((0,), (5,)))
    fused = stored_place(norm, {"decoder.layers.mlp.linear_fc1.layer_norm_weight": ()}, 4)
    assert fused.whole == (4, 5) and fused.box == Box((2, 0), (1, 5))


def test_the_folder_of_the_newest_iteration(tmp_path: Path) -> None:
    newest = tmp_path / "iter_0000012"
    newest.mkdir()
    (newest / METADATA).touch()
    assert iteration_folder(newest) == newest
    with pytest.raises(ModelError, match=f"has no .metadata; give .* the one with {TRACKER}"):
        iteration_folder(tmp_path)
    (tmp_path / TRACKER).write_text("12")
    assert iteration_folder(tmp_path) == newest
    shutil.move(newest, tmp_path / "release")
    (tmp_path / TRACKER).write_text("release\n")
    assert iteration_folder(tmp_path) == tmp_path / "release"
    (tmp_path / TRACKER).write_text("../12")
    with pytest.raises(ModelError, match="holds '../12', no iteration"):
        iteration_folder(tmp_path)
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ModelError, match="format torch, whose pickles could run code"):
        iteration_folder(tmp_path / "old")
