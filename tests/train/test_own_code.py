"""A run whose surrogate, advantages, optimizer, reward, perturbation and callback are the examples
of one's own code.
"""

from __future__ import annotations

import math
from pathlib import Path

from tests.support.training_runs import base_config, launch, records, tiny_model

OWN = f"{Path(__file__).parents[2]}/examples/own_code"


def test_a_run_of_ones_own_code_on_two_ranks(tmp_path: Path):
    config = base_config(
        tiny_model(tmp_path / "model"),
        tmp_path / "run",
        parallel={"expert_model_parallel_size": 2},
        algorithm={
            "name": "mine",
            "importance_sampling_level": "token",
            "loss_agg_mode": "token-mean",
            "surrogate": f"{OWN}/surrogate.py:tapered",
            "surrogate_options": {"largest": 0.9},
            "advantage_estimator": f"{OWN}/advantages.py:largest_deviation",
        },
        data={
            "verifier": f"{OWN}/batch_reward.py:brief_answers",
            "verifier_options": {"bonus": 0.5},
            "verifier_timeout": 60.0,
        },
        optimizer={"function": f"{OWN}/optimizer.py:ademamix", "options": {"slow_beta": 0.99}},
        routing={"perturbation": f"{OWN}/perturbation.py:rounded", "compare_rollout": True},
        training={"steps": 2},
        checkpoint={"export_hf": False},
    )
    config["callbacks"] = [f"{OWN}/callbacks.py:RepeatedResponses"]
    launch(config, 2)
    steps = [row for row in records(tmp_path / "run") if row["step"]]
    assert len(steps) == 2 and all(0 < row["own/distinct"] <= 1 for row in steps)
    assert all(math.isfinite(row["loss/policy"]) and row["updates"] == 2 for row in steps)
    assert all(row["verifier/error"] == row["verifier/invalid"] == 0 for row in steps)


def test_ones_own_code_that_fails_ends_the_run_before_it_begins(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "def loss(ratio, advantages):\n    return ratio * advantages\n"
    )
    config = base_config(
        tiny_model(tmp_path / "model"),
        tmp_path / "run",
        algorithm={
            "name": "mine",
            "importance_sampling_level": "token",
            "loss_agg_mode": "token-mean",
            "surrogate": f"{tmp_path}/own.py:loss",
        },
    )
    life = launch(config, check=False)
    assert not life.finished and "Traceback" not in life.log
    assert f"algorithm.surrogate = '{tmp_path}/own.py:loss': called with (objective, terms) of" in (
        life.log
    )
    assert not (tmp_path / "run").exists()
