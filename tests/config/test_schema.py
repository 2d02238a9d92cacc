"""A config from its file to its dump."""

from __future__ import annotations

from pathlib import Path

import yaml

from megatron_gspo.config import load_config
from megatron_gspo.config.load import split_server_arguments


def test_defaults_and_overrides(file: Path) -> None:
    config = load_config(
        file, ["optimizer.lr=1e-6", "seed=7", "evaluation.pass_at_k=[1]", "optimizer.lr=2e-6"]
    )
    assert config.optimizer.lr == 2e-6  # the later one is used; YAML 1.1 would read it as text
    assert (config.seed, config.evaluation.pass_at_k) == (7, (1,))
    assert config.parallel.tensor_model_parallel_size == 1


def test_dump_gives_the_same_config_back(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["algorithm.name=grpo", "data.task.kwargs.min_terms=3"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(config.to_yaml())
    assert load_config(copy) == config
    assert config.data.task is not None and config.data.task.kwargs == {"min_terms": 3}


def test_a_runs_own_config_is_a_config(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump({**load_config(file).dump(), "environment": {"host": "here"}}))
    assert load_config(copy) == load_config(file)


def test_arguments_of_the_command_line_follow_those_of_the_file(plain, tmp_path: Path):
    file = tmp_path / "config.yaml"
    plain["rollout"]["engine"] = "sglang"
    plain["sglang"] = {"num_servers": 1, "server_args": ["--x", "1"]}
    file.write_text(yaml.safe_dump(plain))
    ours, theirs = split_server_arguments(["seed=3", "--sglang.x", "2"])
    config = load_config(file, ours, server_args=theirs)
    assert config.sglang.server_args == ("--x", "1", "--x", "2") and config.seed == 3


def test_the_optimizer_steps_of_a_run(file: Path) -> None:
    config = load_config(file, ["training.steps=5", "training.ppo_epochs=2"])
    responses = 16 * 8
    assert config.optimizer_steps == 5 * 2 * responses // config.training.global_batch_size
