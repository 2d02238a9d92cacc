"""The studies' callbacks in whole runs: of perturbed routers its metrics, and a strength that a
resumed run keeps; of stale responses their age.
"""

from __future__ import annotations

import shutil

import pytest

from tests.fault_injection.bitwise_diff import first_difference
from tests.fault_injection.process_harness import warm_up
from tests.support.collapse_noise import COLLAPSE, STUDY, noise_section
from tests.support.training_runs import base_config, tiny_model
from tests.train.test_routing import run_here


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    warm_up()
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_calibrated_noise_is_the_same_in_a_resumed_run(model, tmp_path):
    """The weights move so far that another calibration would find another strength."""
    config = base_config(
        model,
        tmp_path / "run",
        algorithm={"name": "grpo"},
        optimizer={"lr": 5e-2},
        training={"steps": 3},
        routing=noise_section(target_flip_rate=0.2),
        evaluation={"at_start": False},
        checkpoint={"save_interval": 1, "keep": 3},
    )
    config["callbacks"] = [STUDY]
    rows, log = run_here(config)
    assert (
        log.count("of the experts differ") == 1
        and len({row["routing/noise_strength"] for row in rows}) == 1
    )
    assert "eval/accuracy_without_noise" in rows[-1]
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "run", whole)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    resumed, log = run_here(config)
    assert resumed[-1]["routing/noise_strength"] == rows[0]["routing/noise_strength"]
    assert "step 1" in log and "of the experts differ" not in log
    assert first_difference(tmp_path / "run", whole) == ""


def test_stale_responses_are_up_to_three_steps_old(model, tmp_path):
    config = base_config(
        model,
        tmp_path / "run",
        training={"steps": 5},
        evaluation={"at_start": False},
        checkpoint={"export_hf": False},
    )
    config["callbacks"] = [f"{COLLAPSE}/stale.py:StaleResponses"]
    rows, _ = run_here(config)
    is_fresh = [row["mismatch/abs_diff_max"] < 1e-4 for row in rows if row["step"]]
    assert is_fresh == [True, False, False, False, True]
