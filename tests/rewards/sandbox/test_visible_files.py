"""A run whose files the programs of its model could read is refused."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_gspo.config import ConfigError, DataConfig, SourceConfig
from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.config.training_sections import EvaluationConfig
from megatron_gspo.rewards.sandbox import visible_files
from megatron_gspo.rewards.sandbox.isolation import Interpreter
from megatron_gspo.rewards.sandbox.visible_files import refuse_visible_files, refuse_visible_run


@pytest.fixture
def visible(tmp_path, monkeypatch):
    """A folder that programs can read."""
    folder = tmp_path / "lib"
    folder.mkdir()
    interpreter = Interpreter("python", ("/usr/lib", str(folder)))
    monkeypatch.setattr(visible_files, "find_interpreter", lambda executable: interpreter)
    return folder


def refused(key, **paths):
    with pytest.raises(ConfigError) as info:
        refuse_visible_files(CodeConfig(), paths)
    assert info.value.key == key and "can read" in str(info.value) and "move it" in str(info.value)


def test_paths_below_what_programs_read_are_refused(visible, tmp_path, monkeypatch):
    refused("prompts", prompts=str(visible / "train.jsonl"))
    refused("prompts", prompts=str(visible))
    refused("prompts", prompts=[str(tmp_path / "a.jsonl"), str(visible / "*.parquet")])
    refused("prompts", prompts=f"{visible}/data:test")
    (tmp_path / "link").symlink_to(visible)
    refused("run_dir", run_dir=tmp_path / "link" / "run")
    monkeypatch.setenv("DATA", str(visible))
    refused("prompts", prompts="$DATA/train.jsonl")
    monkeypatch.setenv("HOME", str(visible / "me"))
    refused("prompts", prompts="~/train.jsonl")
    refused("HOME")
    monkeypatch.chdir(visible)
    refused("prompts", prompts="train.jsonl")
    refused("the working directory", prompts="/data/train.jsonl")


def test_others_are_not(visible, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {
        "prompts": f"{visible}2/train.jsonl",
        "eval_prompts": None,
        "run_dir": "runs",
        "model": "/usr/share/model",
    }
    refuse_visible_files(CodeConfig(), paths)
    refuse_visible_files(
        CodeConfig(sandbox_url="http://host:1"), {"prompts": visible / "train.jsonl"}
    )


def run(data: DataConfig, **evaluation: str) -> SimpleNamespace:
    model = SimpleNamespace(path="model")
    return SimpleNamespace(
        data=data, evaluation=EvaluationConfig(**evaluation), model=model, run_dir="run"
    )


@pytest.mark.parametrize("name", ["", "maths"])
def test_a_run_names_the_key(visible, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    files = {"eval_prompts": f"{visible}/held_out.jsonl", "verifier": "code"}
    data = DataConfig(**files)
    if name:
        words = SourceConfig(name="words", prompts="words.jsonl")
        data = DataConfig(sources=(words, SourceConfig(name=name, **files)))
    section = f"data.sources.{name}" if name else "data"
    with pytest.raises(
        ConfigError, match=f"{section}.eval_prompts = .* can read .*lib, and this with it"
    ):
        refuse_visible_run(run(data))
    refuse_visible_run(run(replace(data, verifier="exact_match", sources=())))


def test_programs_of_held_out_responses_alone(visible, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = DataConfig(prompts=f"{visible}/train.jsonl")
    refuse_visible_run(run(data))
    with pytest.raises(ConfigError, match=r"data.prompts = .* can read .*lib, and this with it"):
        refuse_visible_run(run(data, verifier="code"))


@pytest.mark.skipif(not os.path.isdir("/usr/lib/python3"), reason="not Debian")
def test_the_system_s_libraries_are_visible(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refused("data.prompts", **{"data.prompts": "/usr/lib/python3/train.jsonl"})
