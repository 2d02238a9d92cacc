"""`~` and variables in the paths of a config and of command lines."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from megatron_gspo.config import (
    Config,
    DataConfig,
    LoRAConfig,
    RolloutConfig,
    SGLangConfig,
    load_config,
)
from megatron_gspo.config.paths import expand_paths
from megatron_gspo.paths import PathError, expand_path, path_argument
from tests.config.building import fault


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HOME": "/home/user",
        "SCRATCH": "/scratch",
        "LATER": "~/later",
        "EMPTY": "",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ABSENT", raising=False)


@pytest.mark.parametrize(
    ("written", "expanded"),
    [
        ("~", "/home/user"),
        ("~/runs/x", "/home/user/runs/x"),
        ("~root/x", "/root/x"),
        ("$SCRATCH/runs", "/scratch/runs"),
        ("${SCRATCH}_2/runs", "/scratch_2/runs"),
        ("$LATER/x", "/home/user/later/x"),
        ("a/~/b~", "a/~/b~"),
        ("cost$5", "cost$5"),
        ("end$", "end$"),
        ("verifier.py:score", "verifier.py:score"),
        ("~/verifier.py:score", "/home/user/verifier.py:score"),
    ],
)
def test_what_a_path_stands_for(written: str, expanded: str) -> None:
    assert expand_path(written) == expanded


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("$ABSENT/x", "the environment has no variable ABSENT; set it, or write the whole path"),
        ("${ABSENT}", "the environment has no variable ABSENT"),
        ("$EMPTY/x", "the environment variable EMPTY is empty"),
        ("${SCRATCH:-/tmp}/x", "${SCRATCH:-/tmp} is not a variable; write ${NAME}"),
        ("${oc.env:HOME}/x", "${oc.env:HOME} is not a variable"),
        ("${SCRATCH/x", "${SCRATCH/x is not a variable"),
        ("${}", "${} is not a variable"),
        ("~no_such_user/x", "~no_such_user is not the home directory of any user"),
    ],
)
def test_what_stands_for_nothing(written: str, message: str) -> None:
    with pytest.raises(PathError) as caught:
        expand_path(written)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(argparse.ArgumentTypeError):
        path_argument(written)


PATHS = (
    "run_dir",
    "model.path",
    "critic.path",
    "data.prompts",
    "data.eval_prompts",
    "data.cache_dir",
    "data.code.python",
)


def test_every_path_of_a_config(plain: dict) -> None:
    plain["data"] = {"verifier": "~/v.py:score"}
    for key in PATHS:
        section = plain
        *sections, leaf = key.split(".")
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = "~/x"
    plain["algorithm"] = {"name": "ppo"}
    config = Config.from_dict(plain)
    for key in PATHS:
        value: object = config
        for name in key.split("."):
            value = getattr(value, name)
        assert str(value).startswith("/home/user/"), key
    assert config.data.verifier == "/home/user/v.py:score"


def test_paths_of_servers_and_lists() -> None:
    rollout = RolloutConfig(rollout_batch_size=1, environment="~/e.py:make")
    assert expand_paths(rollout).environment == "/home/user/e.py:make"
    assert expand_paths(LoRAConfig(rank=8, adapter_path="~/a")).adapter_path == "/home/user/a"
    section = SGLangConfig(python="~/p", api_key_file="$SCRATCH/key", weight_dir="${SCRATCH}/w")
    assert expand_paths(section) == SGLangConfig(
        python="/home/user/p", api_key_file="/scratch/key", weight_dir="/scratch/w"
    )
    data = expand_paths(DataConfig(prompts=("~/a.jsonl", "b.jsonl")))
    assert data.prompts == ("/home/user/a.jsonl", "b.jsonl")


def test_files_and_overrides(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(file.parent))
    config = load_config(f"$FOLDER/{file.name}", ["run_dir=~/runs/x", "model.path=$SCRATCH/model"])
    assert (config.run_dir, config.model.path) == ("/home/user/runs/x", "/scratch/model")
    assert Config.from_dict(config.dump() | {"run_dir": "/r"}) == dataclasses.replace(
        config, run_dir="/r"
    )


def test_a_fault_names_key_and_value(file: Path) -> None:
    assert (
        fault(file, "model.path=$ABSENT/model")
        == 'model.path = "$ABSENT/model": the environment has no variable ABSENT; set it, or write'
        " the whole path"
    )
    assert fault(Path("$ABSENT/run.yaml")).startswith(
        "$ABSENT/run.yaml: the environment has no variable ABSENT; "
    )
