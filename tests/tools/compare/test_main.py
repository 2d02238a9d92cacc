"""The command line: a comparison of two real runs, and its messages for bad input."""

import dataclasses
import json

import pytest
import yaml

from megatron_gspo.tools.compare.__main__ import main
from megatron_gspo.tools.compare.cold_start import prepare
from megatron_gspo.tools.compare.study_plan import load_comparison
from megatron_gspo.tools.compare.study_runner import StaleRun
from tests.support.prompt_rows import write_jsonl
from tests.support.training_runs import base_config, tiny_model
from tests.tools.compare.synthetic import EXAMPLES, write_comparison


@pytest.mark.slow
def test_two_variants_are_trained_and_compared(tmp_path, capfd):
    model = tiny_model(tmp_path / "model")
    base = base_config(
        model, tmp_path / "unused", evaluation={"eval_interval": 1}, tracking={"plot": False}
    )
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    settings = {
        "folder": str(tmp_path / "out"),
        "base": "base.yaml",
        "overrides": {"training.steps": 2, "checkpoint.export_hf": False},
        "baseline": "grpo",
        "seeds": [3],
        "variants": [
            {"name": "grpo", "overrides": {"algorithm.name": "grpo"}},
            {"name": "grpo_r2", "overrides": {"algorithm.name": "grpo", "routing.replay": "r2"}},
        ],
    }
    file = tmp_path / "compare.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert main([str(file), "--slots", "2"]) == 0
    said = capfd.readouterr()
    assert "2/2" in said.err and "grpo_r2 seed 3: finished" in said.err
    runs = [tmp_path / "out" / "runs" / "base" / name / "seed_3" for name in ("grpo", "grpo_r2")]
    first = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
    assert [config["routing"]["replay"] for config in first] == ["none", "r2"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 variants, 1 seed, 2 runs (2 finished)" in page

    written = [(run / "summary.json").stat().st_mtime_ns for run in runs]
    assert main([str(file)]) == 0  # nothing is run again
    assert written == [(run / "summary.json").stat().st_mtime_ns for run in runs]


def test_a_report_of_a_comparison_that_has_not_run_says_so(tmp_path, capsys):
    file = write_comparison(tmp_path, seeds=(1,), names=("grpo", "gspo"))
    assert main([str(file), "--report-only"]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "grpo seed 1: missing" in page
    assert f"<pre>megatron-gspo compare {file}</pre>" in page  # which does run


def test_a_cold_start_of_other_settings_is_refused(tmp_path):
    file = write_comparison(tmp_path, seeds=(1,), names=("grpo", "gspo"))
    start = str(EXAMPLES / "tiny_cold_start.yaml")
    data = yaml.safe_load(file.read_text()) | {"cold_start": {"config": start}}
    file.write_text(yaml.safe_dump(data))
    comparison = load_comparison(file)
    comparison.folder.mkdir()
    (comparison.folder / "cold_start.json").write_text(
        json.dumps(dataclasses.asdict(comparison.config.cold_start))
    )
    prepare(comparison)  # the same settings: nothing to do
    data["cold_start"]["model"] = {"experts": 32}
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(StaleRun, match="made with other settings"):
        prepare(load_comparison(file))


def test_a_cold_start_learns_the_prompts_that_the_runs_train_on(tmp_path, monkeypatch):
    file = write_comparison(tmp_path, seeds=(1,), names=("grpo", "gspo"))
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "1+1:", "answer": "234"}])
    write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": "2+1:", "answer": "345"}])
    data = yaml.safe_load(file.read_text())
    data["overrides"] = {
        "data.task": None,
        "data.verifier": "exact_match",
        "data.prompts": str(tmp_path / "train.jsonl"),
        "data.eval_prompts": str(tmp_path / "held_out.jsonl"),
    }
    start = str(EXAMPLES / "tiny_cold_start.yaml")
    data["cold_start"] = {
        "config": start,
        "model": {"hidden": 16, "layers": 1},
        "mistakes": 0.0,
        "copies": 2,
    }
    file.write_text(yaml.safe_dump(data))
    monkeypatch.setattr("megatron_gspo.tools.compare.cold_start.imitate", lambda *_: None)
    comparison = load_comparison(file)
    prepare(comparison)
    shown = (comparison.folder / "demonstrations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in shown] == [{"prompt": "1+1:", "answer": "234"}] * 2
