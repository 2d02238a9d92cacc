"""The studies' callbacks in whole runs: the metrics of perturbed routers, and the age of stale
responses.
"""

from __future__ import annotations

from tests.fault_injection.process_harness import warm_up
from tests.support.collapse_noise import COLLAPSE, STUDY, noise_section
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


def test_stale_responses_are_up_to_three_steps_old(tmp_path):
    warm_up()
    config = base_config(
        tiny_model(tmp_path / "model"),
        tmp_path / "run",
        training={"steps": 5},
        evaluation={"at_start": False},
        checkpoint={"export_hf": False},
    )
    config["callbacks"] = [f"{COLLAPSE}/stale.py:StaleResponses"]
    rows, _ = run_here(config)
    is_fresh = [row["mismatch/abs_diff_max"] < 1e-4 for row in rows if row["step"]]
    assert is_fresh == [True, False, False, False, True]
