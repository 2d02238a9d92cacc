"""Training on truncated samples, in a whole run with the embedded engine."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.tracking import read_metrics
from tests.support.training_runs import base_config, launch, tiny_model


def test_ratios_are_over_the_ids_that_could_be_drawn(tmp_path: Path) -> None:
    """The first update's ratio is exactly 1, and the engine's log-probs are the trainer's."""
    run_dir = tmp_path / "run"
    config = base_config(
        tiny_model(tmp_path / "model"),
        run_dir,
        algorithm={"name": "grpo"},
        rollout={"temperature": 0.7, "top_p": 0.8, "min_p": 0.02, "max_support": 128},
        training={"steps": 2},
        evaluation={"at_start": False},
        checkpoint={"export_hf": False},
    )
    launch(config)
    steps = [row for row in read_metrics(run_dir) if row["step"]]
    assert len(steps) == 2
    for row in steps:
        assert row["log_ratio/first_update"] == 0
        assert row["mismatch/abs_diff_max"] < 1e-4
        assert row["ratio_token/max"] != 1  # of the second update
