"""The model directory, and the config against its config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.config.building import PPO, build, refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("routing.replay=r2", 'routing.replay = "r2": the model has no experts; set it to none'),
        ("routing.replay=r3", 'routing.replay = "r3": the model has no experts; set it to none'),
        (
            "routing.compare_rollout=true",
            "routing.compare_rollout = true: the model has no experts; set it to false",
        ),
        (
            "routing.perturbation=my.py:noise",
            'routing.perturbation = "my.py:noise": the model has no experts; remove the key',
        ),
    ],
)
def test_a_dense_model_has_no_routes(
    plain: dict, tmp_path: Path, override: str, message: str
) -> None:
    file = tmp_path / "model" / "config.json"
    build(plain, override).check(1)
    hf = json.loads(file.read_text())
    del hf["num_experts"]
    file.write_text(json.dumps({**hf, "model_type": "qwen3", "intermediate_size": 64}))
    assert refused(plain, override, world_size=1) == message


def test_model_directories(plain: dict, tmp_path: Path) -> None:
    assert "is not a directory" in refused(plain, f"model.path={tmp_path}/absent", world_size=1)
    assert "has no config.json" in refused(plain, f"model.path={tmp_path}", world_size=1)
    assert "no *.safetensors weights" in refused(plain, "model.init=pretrained", world_size=1)
    config_json = Path(plain["model"]["path"]) / "config.json"
    config_json.write_text('{"model_type": "gpt2"}')
    assert "use one of qwen3, qwen3_moe" in refused(plain, world_size=1)
    config_json.write_text("{")
    assert "is not a JSON object" in refused(plain, world_size=1)


def test_a_megatron_checkpoint_in_place_of_weights(plain: dict, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    pretrained = "model.init=pretrained"
    key = f"model.megatron_path={folder}"
    assert refused(plain, pretrained, key, world_size=1).endswith(
        f"{folder} is not a directory; give the folder of an iteration in Megatron's format"
        " torch_dist, or the one with latest_checkpointed_iteration.txt"
    )
    folder.mkdir()
    (folder / ".metadata").touch()
    build(plain, pretrained, key).check(1)
    assert "model.init: random draws the weights" in refused(
        plain, "model.init=random", key, world_size=1
    )


def test_the_value_models_directory(plain: dict, tmp_path: Path) -> None:
    critic = tmp_path / "critic"
    path = f"critic.path={critic}"
    message = refused(plain, *PPO, path, world_size=1)
    assert message.startswith("critic.path = ") and "is not a directory" in message
    policy = Path(plain["model"]["path"])
    hf = {**json.loads((policy / "config.json").read_text()), "vocab_size": 100}
    (policy / "config.json").write_text(json.dumps(hf))
    shutil.copytree(policy, critic)
    build(plain, *PPO, path).check(1)
    file = critic / "config.json"
    for key, message in (
        ("vocab_size", "has a vocabulary of 1, the policy of"),
        ("max_position_embeddings", "has positions of 1, the policy of"),
    ):
        file.write_text(json.dumps({**hf, key: 1}))
        assert message in refused(plain, *PPO, path, world_size=1)
    file.write_text(json.dumps({**hf, "model_type": "gpt2"}))
    assert refused(plain, *PPO, path, world_size=1).startswith("critic.path = ")
    assert "has no effect with algorithm.advantage_estimator = group" in refused(plain, path)
