"""The files of a config: whole ones, broken ones, and a run directory that others have used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_gspo.config import Config
from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    begin_checkpoint,
    checkpoint_path,
    publish_checkpoint,
)
from megatron_gspo.tools.doctor import input_checks
from megatron_gspo.tools.doctor.findings import Finding, examine
from tests.support.command_line import small_config
from tests.support.training_runs import tiny_model


@pytest.fixture
def config(model: str, tmp_path: Path) -> Config:
    return Config.from_dict(small_config(model, tmp_path))


def only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def test_a_whole_model(config):
    shape, findings = input_checks.check_weights(config)
    assert only(findings).level == "ok"
    assert "parameters" in only(findings).what and "every tensor there" in only(findings).what
    findings = input_checks.check_tokenizer_and_prompts(config, shape)
    assert [f.level for f in findings] == ["ok", "ok"]
    assert findings[1].what == "6 training prompts, 0 held out"


def lose_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage, says",
    [(lose_a_tensor, "lacks lm_head.weight (1 missing)"), (cut_short, "damaged or cut short")],
)
def test_a_broken_model(damage, says, tmp_path):
    model = tiny_model(tmp_path / "model")
    damage(Path(model))
    config = Config.from_dict(small_config(model, tmp_path))
    finding = only(examine("model.weights", lambda: input_checks.check_weights(config)[1]))
    assert finding.level == "error" and says in finding.what
    assert finding.fix == "give a complete safetensors checkpoint of a supported model"


def save(config: Config, step: int) -> Path:
    """A checkpoint of one file, as far as the directory shows it."""
    folder = Path(config.run_dir) / "checkpoints"
    partial = begin_checkpoint(folder, step)
    (partial / "weights").write_bytes(b"x" * 1000)
    publish_checkpoint(partial, checkpoint_path(folder, step), {"step": step}, keep=5)
    return checkpoint_path(folder, step)


def test_a_run_resumes_from_the_newest_whole_checkpoint(model, tmp_path):
    config = Config.from_dict(small_config(model, tmp_path, training={"steps": 9}))
    first = save(config, 2)
    second = save(config, 4)
    assert (
        only(input_checks.check_checkpoints(config)).what == f"resumes from {second}, step 4 of 9"
    )
    os.truncate(second / "weights", 10)
    faults = input_checks.check_checkpoints(config)
    assert [f.level for f in faults] == ["warning", "ok"]
    assert faults[0].what == f"{second} is incomplete (weights: 10 of 1000 bytes)"
    assert faults[1].what == f"resumes from {first}, step 2 of 9"


def test_a_run_that_is_done(config):
    newest = save(config, 1)
    finding = only(input_checks.check_checkpoints(config))
    assert finding.level == "note" and finding.what == f"{newest} is at step 1 of 1"


def test_records_without_a_checkpoint_would_be_cleared(config):
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "metrics.jsonl").write_text("")
    assert only(input_checks.check_checkpoints(config)).level == "warning"
