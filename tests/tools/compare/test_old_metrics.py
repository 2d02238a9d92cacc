"""Run directories of older versions: their metrics and config are read under the present names."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.__main__ import main
from megatron_gspo.tools.compare.old_metrics import present_name, with_present_names
from megatron_gspo.tools.compare.run_records import mean_of, read_run

OLD = Path(__file__).parent / "old_format"


@pytest.mark.parametrize(
    "old, new",
    [
        ("routing/holes", "routing/missing_routes"),
        ("rollout/distrusted", "rollout/stale_responses"),
        ("time/probe", "time/log_prob_check"),
        ("probe/abs_diff_max", "log_prob_check/abs_diff_max"),
        ("rollout_correction/weight_mean", "rollout_is/weight_mean"),
        ("rollout_mask/sequences", "rollout_rs/sequences"),
        ("mismatch/abs_diff", "mismatch/abs_diff"),
        ("step", "step"),
        ("rollout/requests", "rollout/requests"),
    ],
)
def test_names(old, new):
    assert present_name(old) == new
    assert present_name(new) == new


def test_a_present_name_wins():
    both = {"step": 1, "routing/missing_routes": 2.0, "routing/holes": 7.0}
    assert with_present_names(both) == {"step": 1, "routing/missing_routes": 2.0}


def test_an_old_run_is_read_under_present_names():
    run = read_run(OLD / "gspo", setting="base", variant="gspo")
    assert run.status == "finished" and run.seed == 1
    assert mean_of(run, "routing/missing_routes") == 2.5
    assert mean_of(run, "rollout_is/weight_mean") == 0.99
    assert not any(name.partition("/")[0] in ("probe", "rollout_mask") for row in run.records for name in row)


def test_an_old_config_is_read_under_present_keys():
    config = read_run(OLD / "gspo", setting="base", variant="gspo").config
    assert config["algorithm"]["loss_agg_mode"] == "seq-mean-token-mean"
    assert config["algorithm"]["dynamic_sampling"] is False and config["algorithm"]["max_num_gen_batches"] == 4
    assert config["tracking"] == {"plot": False, "detailed_timers": True}
    assert "environment" not in config


def test_old_runs_compare(tmp_path, capsys):
    runs = [str(OLD / "grpo"), str(OLD / "gspo")]
    assert main(["--runs", *runs, "--baseline", "grpo", "--output", str(tmp_path)]) == 0, capsys.readouterr().err
    with (tmp_path / "runs.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert {name: float(row["final_accuracy"]) for name, row in rows.items()} == {"grpo": 0.6, "gspo": 0.7}
    assert float(rows["grpo"]["routing/missing_routes"]) == 2.5
