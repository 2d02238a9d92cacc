"""The study of perturbed routers in a whole run: its metrics."""

from __future__ import annotations

from tests.fault_injection.process_harness import warm_up
from tests.support.collapse_noise import STUDY, noise_section
from tests.support.training_runs import base_config, tiny_model
from tests.train.test_routing import run_here


def test_a_run_logs_the_strength_and_the_accuracy_of_clean_routers(tmp_path):
    warm_up()
    config = base_config(
        tiny_model(tmp_path / "model"),
        tmp_path / "run",
        algorithm={"name": "grpo"},
        training={"steps": 1},
        routing=noise_section(strength=0.5),
        evaluation={"at_start": False},
    )
    config["callbacks"] = [STUDY]
    [row], _ = run_here(config)
    assert row["routing/noise_strength"] == 0.5
    assert "eval/accuracy" in row and "eval/accuracy_without_noise" in row
