"""YAML files, overrides and the servers' arguments of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gspo.config import load_config
from megatron_gspo.config.load import parse_yaml, split_server_arguments
from tests.config.building import fault


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "model.path.x=1",
            "model.path.x = 1: model.path is a value, not a section; set model.path itself",
        ),
        ("seed", "seed: is not an override; write key.sub=value, e.g. optimizer.lr=1e-6"),
        ("--seed=1", "--seed=1: overrides take no dashes; write seed=1"),
    ],
)
def test_overrides_that_are_none(file: Path, override: str, expected: str) -> None:
    assert fault(file, override) == expected


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MERGED = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            BOMB,
            (
                "has more than 100,000 values with its aliases (*name) written out; write the"
                " values that are meant"
            ),
        ),
        (MERGED, "has more than 100,000 values with its aliases"),
        ("a: &a [*a]", "has an alias to a value that contains it (line 1)"),
        ("a: &a {<<: *a}", "has an alias to a value that contains it (line 1)"),
        (
            "x: " + "[" * 5000,
            "is not YAML (line 1, column 67): more than 64 levels of lists and mappings",
        ),
        ("x: " + "{a: " * 5000, "more than 64 levels of lists and mappings"),
        (
            "".join(" " * level + "a:\n" for level in range(500)),
            "more than 64 levels of lists and mappings",
        ),
        (
            "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 70)),
            "has more than 64 levels",
        ),
        ("seed: " + "9" * 10_000, "(10000 characters): is a number of more than 64 bits (line 1)"),
        ("seed: 0x" + "9" * 10_000, "is a number of more than 64 bits (line 1)"),
        (
            "seed: 010",
            (
                "010: is not an integer (line 1); write it without leading zeros, or in quotes if"
                " it is text"
            ),
        ),
        ("seed: !!int abc", "abc: is not an integer (line 1)"),
        ("seed: !!bool abc", "has a value that cannot be read"),
        (
            "seed: !!python/object/apply:os.getcwd []",
            "could not determine a constructor for the tag",
        ),
        ("seed: !!binary aGVs", "could not determine a constructor for the tag"),
        ('run_dir: "a\\0b"', "has a NUL character or half of a surrogate pair (line 1); remove it"),
        (
            'run_dir: "a\\ud83d"',
            "has a NUL character or half of a surrogate pair (line 1); remove it",
        ),
        ("seed: 1\0", "is not YAML: special characters are not allowed"),
        ("seed:\n\t1", "is not YAML (line 2, column 1)"),
        ("a: 1\n---\nb: 2", "is not YAML (line 2, column 1): but found another document"),
        ("a: *b", "found undefined alias"),
        ("a: &x {b: 1}\nc: {<<: *x, <<: *x}", "<<: appears twice (line 2); keep one of them"),
        ("x: 1 # " + "y" * (1 << 20), "is larger than 1.0 MiB; give the path of a YAML file"),
    ],
)
def test_files_that_no_config_is(file: Path, content: str, expected: str) -> None:
    file.write_text(content)
    message = fault(file)
    assert expected in message and len(message) < 500


def test_overrides_that_no_config_has(file: Path) -> None:
    assert "more than 64 levels" in fault(file, "data.verifier_options=" + "[" * 5000)
    assert "is not an override" in fault(file, ".".join("a" * 500) + "=1")
    assert "is a number of more than 64 bits" in fault(file, "seed=" + "9" * 10_000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000),
        ("-5", -5),
        ("+3", 3),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("0b11", 3),
        ("1.", 1.0),
        ("010.5", 10.5),
        (".inf", float("inf")),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("=", "="),
        ("2026-13-45", "2026-13-45"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("'010'", "010"),
        ("~/x", "~/x"),
        ("\ufeffa", "a"),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("", None),
    ],
)
def test_what_a_value_is(text: str, value: object) -> None:
    parsed = parse_yaml(text, "text")
    assert parsed == value and type(parsed) is type(value)


def test_a_text_that_yaml_reads_as_another_type_is_to_be_quoted(file: Path) -> None:
    assert (
        fault(file, "data.prompt_key=no")
        == "data.prompt_key = false: is not allowed; set string, in quotes"
    )
    assert fault(file, "run_dir=20261128").endswith("set string, in quotes")


def test_anchors_and_merged_keys_work(file: Path, plain: dict) -> None:
    plain.pop("training")
    text = "training: {<<: &t {steps: 1, global_batch_size: 32}, steps: 2}\n" + yaml.safe_dump(
        plain
    )
    file.write_text("\ufeff" + text.replace("\n", "\r\n"), encoding="utf-8")
    assert load_config(file).training.steps == 2


def test_unreadable_files(tmp_path: Path) -> None:
    assert "cannot read the config: no such file or directory" in fault(tmp_path / "absent.yaml")
    assert "cannot read the config: is a directory" in fault(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in fault(tmp_path / "binary.yaml")


ARGUMENTS = {
    "a value": (["--sglang.mem-fraction-static", "0.7"], [], ["--mem-fraction-static", "0.7"]),
    "after =": (["--sglang.mem-fraction-static=0.7"], [], ["--mem-fraction-static=0.7"]),
    "a flag": (["--sglang.enable-x"], [], ["--enable-x"]),
    "a flag, then an override": (["--sglang.enable-x", "seed=3"], ["seed=3"], ["--enable-x"]),
    "a value, then an override": (
        ["--sglang.x", "1", "optimizer.lr=1e-6"],
        ["optimizer.lr=1e-6"],
        ["--x", "1"],
    ),
    "an override between": (
        ["--sglang.x", "a.b=1", "--sglang.y", "2"],
        ["a.b=1"],
        ["--x", "--y", "2"],
    ),
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
    arguments = split_server_arguments(["--vllm.a", "1", "--sglang.b=2", "seed=3", "--vllm.c", "4"])
    assert arguments == (["seed=3"], {"vllm": ["--a", "1", "--c", "4"], "sglang": ["--b=2"]})
