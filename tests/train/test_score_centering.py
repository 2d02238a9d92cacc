"""Score centering in whole steps and runs with the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import Config
from megatron_gspo.tracking import read_metrics
from tests.support.distributed import run_distributed
from tests.support.training_runs import base_config, first_step, launch, tiny_model

TOP_K = 8


def config_of(model: str, run_dir: Path, top_k: int) -> dict[str, Any]:
    """One update a step, by which engine and policy are equal but for rounding."""
    return base_config(
        model,
        run_dir,
        algorithm={"name": "grpo", "score_centering": top_k},
        rollout={"temperature": 0.7},
        training={"steps": 2, "global_batch_size": 16},
        evaluation={"at_start": False},
        checkpoint={"export_hf": False},
    )


def first_metrics(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, float]:
    return first_step(Config.from_dict(config))[1]


def test_nothing_is_centred_where_the_engine_is_the_policy(tmp_path: Path) -> None:
    """Ids of other tokens, or at another temperature, would change the gradient."""
    model = tiny_model(tmp_path / "model")
    run_dir = tmp_path / "centred"
    launch(config_of(model, run_dir, TOP_K))
    steps = [row for row in read_metrics(run_dir) if row["step"]]
    assert len(steps) == 2
    for row in steps:
        assert 0 < row["score_centering/top_k_mass"] < 1
        assert 0 < abs(row["loss/score_centering"]) < 1e-5
    plain_config = config_of(model, tmp_path / "plain", 0)
    [plain] = run_distributed(first_metrics, 1, plain_config)
    assert steps[0]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert "loss/score_centering" not in plain
