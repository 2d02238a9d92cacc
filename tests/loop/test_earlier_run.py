"""What is said of a run directory that was used before: changed settings, another model, inputs
within it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_gspo.config import Config
from megatron_gspo.loop.earlier_run import (
    WEIGHTS,
    check_no_input_is_moved,
    continued_settings,
    weights_digest,
)
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.tracking.run_directory import RunDirectory
from tests.support.training_runs import base_config, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("earlier") / "model")


@pytest.fixture
def begun(model: str, tmp_path: Path) -> Any:
    """The config of a run that has begun in tmp_path, with changes."""
    config = Config.from_dict(base_config(model, tmp_path / "run"))
    with RunDirectory(config.run_dir) as run:
        run.write_config(config.dump(), {"command": "train", WEIGHTS: weights_digest(config)})

    def changed(**sections: Any) -> Config:
        return Config.from_dict(
            {**base_config(sections.pop("path", model), tmp_path / "run", **sections)}
        )

    return changed


def test_the_same_settings_are_no_line(begun):
    assert continued_settings(begun()) == ""


def test_each_changed_key_is_named_with_both_values(begun, tmp_path):
    config = begun(
        optimizer={"lr": 2e-3}, algorithm={"name": "cispo"}, megatron={"moe_z_loss_coeff": 1e-3}
    )
    line = continued_settings(config)
    assert line.startswith(f"{tmp_path}/run continues with other settings: ") and "\n" not in line
    assert "optimizer.lr 0.001 -> 0.002" in line and 'algorithm.name "gspo" -> "cispo"' in line
    assert "megatron.moe_z_loss_coeff unset -> 0.001" in line
    assert "run_dir" not in line.partition(":")[2]


def test_seed_and_data_are_named_too(begun):
    config = Config.from_dict(begun(data={"max_prompt_length": 40}).dump() | {"seed": 8})
    assert continued_settings(config).endswith(": seed 7 -> 8, data.max_prompt_length 32 -> 40")


def test_a_model_that_was_moved_is_a_line(begun, model, tmp_path):
    moved = shutil.copytree(model, tmp_path / "moved")
    assert f'model.path "{model}" -> "{moved}"' in continued_settings(begun(path=str(moved)))


def changed_weights(folder: Path) -> None:
    """Other values in files of the same size."""
    file = folder / "model.safetensors"
    tensors = {
        name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def test_another_model_is_refused(begun, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    changed_weights(other)
    with pytest.raises(CheckpointError) as raised:
        continued_settings(begun(path=str(other)))
    assert (
        str(raised.value)
        == f"model.path = {other}: the run in {tmp_path}/run began with another model, {model}; "
        "choose another run_dir, or set model.path back"
    )


def test_other_weights_in_the_same_place_are_refused(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config = Config.from_dict(base_config(str(folder), tmp_path / "run"))
    with RunDirectory(config.run_dir) as run:
        run.write_config(config.dump(), {WEIGHTS: weights_digest(config)})
    changed_weights(folder)
    with pytest.raises(
        CheckpointError, match="holds other weights than when the run in .*; choose another run_dir"
    ):
        continued_settings(config)


def test_another_megatron_checkpoint_is_refused(begun, tmp_path):
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / ".metadata").touch()
    (folder / "__0_0.distcp").write_bytes(b"weights")
    config = begun()
    config = replace(config, model=replace(config.model, megatron_path=str(folder)))
    with RunDirectory(config.run_dir) as run:
        run.write_config(config.dump(), {WEIGHTS: weights_digest(config)})
    assert continued_settings(config) == ""
    (folder / "__0_0.distcp").write_bytes(b"others!")
    with pytest.raises(CheckpointError, match=f"model.megatron_path = {folder}: holds other wei"):
        continued_settings(config)


def test_a_users_copy_beside_the_weights_is_not_the_model(begun, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "copied")
    shutil.copy(folder / "model.safetensors", folder / "model (copy).safetensors")
    (folder / "README.md").write_text("mine")
    config = begun(path=str(folder))
    assert weights_digest(config) == weights_digest(begun())


def test_a_run_of_an_older_version_is_compared_as_far_as_it_goes(begun, tmp_path):
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    del content["environment"]
    content["optimizer"]["gone"] = 3
    content["optimizer"]["lr"] = 5e-4
    file.write_text(yaml.safe_dump(content))
    line = continued_settings(begun())
    assert "optimizer.lr 0.0005 -> 0.001" in line and "optimizer.gone 3 -> unset" in line


def test_a_config_that_cannot_be_read_is_said(begun, tmp_path):
    (tmp_path / "run" / "config.yaml").write_text("seed: [")
    assert "is not YAML" in continued_settings(begun())
    assert continued_settings(begun()).endswith("what has changed since then is not known")
    (tmp_path / "run" / "config.yaml").unlink()
    assert continued_settings(begun()) == ""


def test_a_new_run_does_not_move_its_own_model(begun, model, tmp_path):
    shutil.copytree(model, tmp_path / "run" / "hf")
    check_no_input_is_moved(begun())
    with pytest.raises(CheckpointError, match="model.path = .*/run/hf.*; choose another run_dir"):
        check_no_input_is_moved(begun(path=str(tmp_path / "run" / "hf")))
