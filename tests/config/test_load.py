"""YAML files, overrides and the servers' arguments of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gspo.config import load_config
from megatron_gspo.config.load import apply_overrides, parse_yaml, split_server_arguments
from tests.config.building import fault


@pytest.mark.parametrize("text, number", [("1e-6", 1e-6), ("3E4", 3e4), ("-2.5e+3", -2500.0), (".5e1", 5.0)])
def test_scientific_notation_is_a_number(text: str, number: float) -> None:
    assert parse_yaml(text, "text") == number


def test_overrides_leave_the_data_unchanged() -> None:
    data = {"a": {"b": 1}}
    assert apply_overrides(data, ["a.b=2", "a.c.d=[1]", "a.b=3"]) == {"a": {"b": 3, "c": {"d": [1]}}}
    assert data == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.path.x=1", "model.path.x = 1: model.path is a value, not a section; set model.path itself"),
        ("seed", "seed: is not an override; write key.sub=value, e.g. optimizer.lr=1e-6"),
        ("--seed=1", "--seed=1: overrides take no dashes; write seed=1"),
    ],
)
def test_overrides_that_are_none(file: Path, override: str, expected: str) -> None:
    assert fault(file, override) == expected


@pytest.mark.parametrize(
    "content, expected",
    [
        ("seed: 1\nseed: 2\n", "seed: appears twice (line 2); keep one of them"),
        ("seed: [1\n", "is not YAML (line 2, column 1)"),
        ("- 1\n", "is not a mapping of keys"),
        ("", "is not a mapping of keys"),
    ],
)
def test_faulty_files(file: Path, content: str, expected: str) -> None:
    file.write_text(content)
    assert expected in fault(file)


def test_unreadable_files(tmp_path: Path) -> None:
    assert "cannot read the config: no such file or directory" in fault(tmp_path / "absent.yaml")
    assert "cannot read the config: is a directory" in fault(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in fault(tmp_path / "binary.yaml")


def test_merge_keys_work(file: Path, plain: dict) -> None:
    text = yaml.safe_dump({key: plain[key] for key in plain if key != "training"})
    file.write_text(text + "training:\n  <<: {steps: 1, global_batch_size: 32}\n  steps: 2\n")
    assert load_config(file).training.steps == 2


ARGUMENTS = {
    "a value": (["--sglang.mem-fraction-static", "0.7"], [], ["--mem-fraction-static", "0.7"]),
    "after =": (["--sglang.mem-fraction-static=0.7"], [], ["--mem-fraction-static=0.7"]),
    "a flag": (["--sglang.enable-x"], [], ["--enable-x"]),
    "a flag, then an override": (["--sglang.enable-x", "seed=3"], ["seed=3"], ["--enable-x"]),
    "a value, then an override": (["--sglang.x", "1", "optimizer.lr=1e-6"], ["optimizer.lr=1e-6"], ["--x", "1"]),
    "an override between": (["--sglang.x", "a.b=1", "--sglang.y", "2"], ["a.b=1"], ["--x", "--y", "2"]),
    "= and an override": (["--sglang.x=1", "run_dir=/a"], ["run_dir=/a"], ["--x=1"]),
    "after = no value follows": (["--sglang.x=1", "2"], ["2"], ["--x=1"]),
    "several values": (["--sglang.x", "1", "2", "3"], [], ["--x", "1", "2", "3"]),
    "a negative value": (["--sglang.x", "-1"], [], ["--x", "-1"]),
    "a value with =": (["--sglang.x", "A=b"], [], ["--x", "A=b"]),
    "JSON": (["--sglang.x", '{"a.b": 1}'], [], ["--x", '{"a.b": 1}']),
    "a path": (["--sglang.x", "/a.b/c=d"], [], ["--x", "/a.b/c=d"]),
    "two flags": (["--sglang.x", "--sglang.y"], [], ["--x", "--y"]),
    "an option of ours": (["--sglang.x", "--help"], ["--help"], ["--x"]),
    "none": (["seed=3", "model.path=/m"], ["seed=3", "model.path=/m"], []),
    "the case is kept": (["--sglang.X-y_z", "V"], [], ["--X-y_z", "V"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_pass_untouched(case):
    arguments, ours, theirs = ARGUMENTS[case]
    assert split_server_arguments(arguments) == (ours, {"sglang": theirs} if theirs else {})


def test_arguments_of_each_engine_come_apart():
    found = split_server_arguments(["--vllm.a", "1", "--sglang.b=2", "seed=3", "--vllm.c", "4"])
    assert found == (["seed=3"], {"vllm": ["--a", "1", "--c", "4"], "sglang": ["--b=2"]})
