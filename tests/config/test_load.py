"""Loading: strictness, overrides, and the one-line errors."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from megatron_gspo.config import Config, ConfigError, from_command_line, load_config


@pytest.fixture
def file(tmp_path: Path, plain: dict) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def fault(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_and_overrides(file: Path) -> None:
    config = load_config(
        file, ["optimizer.lr=1e-6", "seed=7", "evaluation.pass_at_k=[1]", "optimizer.lr=2e-6"]
    )
    assert config.optimizer.lr == 2e-6  # the later one wins; YAML 1.1 would read it as text
    assert (config.seed, config.evaluation.pass_at_k) == (7, (1,))
    assert config.parallel.tensor_model_parallel_size == 1
    assert config.optimizer_steps == 3 * 1 * (16 * 8 // 32)


@pytest.mark.parametrize("text, number", [("1e-6", 1e-6), ("3E4", 3e4), ("-2.5e+3", -2500.0), (".5e1", 5.0)])
def test_scientific_notation_is_a_number(text: str, number: float) -> None:
    from megatron_gspo.config.load import parse_yaml

    assert parse_yaml(text, "text") == number


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


def test_a_whole_number_is_a_float(file: Path) -> None:
    assert load_config(file, ["rollout.temperature=1"]).rollout.temperature == 1.0


def test_config_is_frozen(file: Path) -> None:
    with pytest.raises(FrozenInstanceError):
        load_config(file).seed = 3


@pytest.mark.parametrize(
    "override, expected",
    [
        ("optimizer.lrr=1", "optimizer.lrr = 1: is not a key; did you mean optimizer.lr?"),
        ("training.lr=1", "training.lr = 1: is not a key; did you mean optimizer.lr?"),
        ("lr=1", "lr = 1: is not a key; did you mean optimizer.lr?"),
        ("trainig.steps=3", 'trainig = {"steps": 3}: is not a key; did you mean training?'),
        ("zzz=1", "zzz = 1: is not a key; remove it, or see docs/config.md for the keys"),
        ("training.steps='8'", 'training.steps = "8": is not allowed; set whole number >= 1, without quotes'),
        ("training.steps=8.0", "training.steps = 8.0: is not allowed; set whole number >= 1"),
        ("training.steps=true", "training.steps = true: is not allowed; set whole number >= 1"),
        ("training.steps=0", "training.steps = 0: is not allowed; set whole number >= 1"),
        ("model.dtype=fp32", 'model.dtype = "fp32": is not allowed; set one of float32, bfloat16'),
        ("rollout.engine=embeded", 'rollout.engine = "embeded": is not allowed; set one of embedded, '
         "sglang, sft, perhaps embedded"),
        ("data.overlong_prompts=cut", 'data.overlong_prompts = "cut": is not allowed; set one of drop, error'),
        ("optimizer.lr=.nan", "optimizer.lr = NaN: is not allowed; set number > 0"),
        ("tracking.wandb=3", "tracking.wandb = 3: is not allowed; set true or false or text"),
        ("model.path=", "model.path = null: is not allowed; set text"),
        ("parallel=3", "parallel = 3: is not allowed; set a section"),
        ("evaluation.pass_at_k=[0]", "evaluation.pass_at_k = 0: is not allowed; set list of whole numbers"),
        ("model.path.x=1", "model.path.x = 1: model.path is a value, not a section; set model.path itself"),
        ("seed", "seed: is not an override; write key.sub=value, e.g. optimizer.lr=1e-6"),
        ("--seed=1", "--seed=1: overrides take no dashes; write seed=1"),
    ],
)  # fmt: skip
def test_faults_name_key_value_and_fix(file: Path, override: str, expected: str) -> None:
    assert fault(file, override) == expected


def test_missing_key(file: Path, plain: dict) -> None:
    del plain["model"]["path"]
    file.write_text(yaml.safe_dump(plain))
    assert fault(file) == "model.path: is missing; set it: text"


def test_missing_section(file: Path, plain: dict) -> None:
    del plain["training"]
    file.write_text(yaml.safe_dump(plain))
    assert fault(file) == "training: is missing; set it: a section with at least steps, global_batch_size"


@pytest.mark.parametrize(
    "content, expected",
    [
        ("seed: 1\nseed: 2\n", "seed: appears twice (line 2); keep one of them"),
        ("seed: [1\n", "is not YAML (line 2, column 1)"),
        ("- 1\n", "holds no mapping of keys"),
        ("", "holds no mapping of keys"),
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


def test_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert from_command_line([str(file), "seed=3"], "usage: x").seed == 3
    for arguments in ([str(file), "seed=x"], ["seed=3"], []):
        with pytest.raises(SystemExit) as caught:
            from_command_line(arguments, "usage: x CONFIG.yaml")
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("config error: ") and error.count("\n") == 1


def test_one_rank_of_a_node_speaks(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        from_command_line([str(file), "seed=x"], "usage: x")
    assert capsys.readouterr().err == ""


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        from_command_line(["--help"], "usage: x")
    assert caught.value.code == 0
    shown = capsys.readouterr().out

    def leaves(schema: dict, prefix: str = "") -> list[str]:
        """Keys as pydantic's JSON schema sees them: a second way to the same list."""
        names = []
        for name, field in schema["properties"].items():
            options = [field, *field.get("anyOf", [])]
            references = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
            inner = [whole["$defs"][reference] for reference in references]
            names += leaves(inner[0], f"{prefix}{name}.") if inner else [prefix + name]
        return names

    whole = TypeAdapter(Config).json_schema()
    names = leaves(whole)
    assert len(names) > 80
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("  ") and line[2] != " "]
    assert sorted(listed) == sorted(names)


def test_every_key_is_described() -> None:
    from megatron_gspo.config.fields import keys

    assert [key.name for key in keys(Config) if not key.description.endswith(".")] == []


def test_reference_page_is_current() -> None:
    from megatron_gspo.config.reference import markdown

    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == markdown(Config), "run `make docs`"


def test_help_needs_neither_megatron_nor_transformers() -> None:
    code = (
        "import sys, megatron_gspo.config as c\n"
        "try: c.from_command_line(['--help'], 'usage')\n"
        "except SystemExit: print({'megatron', 'transformers'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "set()"
