"""The strength of noise that reaches a target: bisection on known functions, and a tiny model
in several layouts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.loop.checkpoints import CheckpointManager, LoopState
from megatron_gspo.loop.engines import perturb_rollout
from megatron_gspo.loop.setup import build_components
from megatron_gspo.loop.timers import Timers
from megatron_gspo.loop.training_loop import train_step
from tests.support.collapse_noise import example_module, noise_section
from tests.support.distributed import run_distributed
from tests.support.training_runs import base_config, tiny_model

TARGET = 0.2
study = example_module("calibration", "NoiseStudy")
bisect = study.bisect
TOLERANCE = study.TOLERANCE


def test_a_target_that_no_strength_reaches() -> None:
    with pytest.raises(
        ConfigError, match="target_flip_rate = 0.8: the strongest noise reaches 0.75; set it below"
    ):
        bisect(lambda s: 0.75 * (1 - math.exp(-s)), 0.8)
    with pytest.raises(
        ConfigError,
        match="= 0.1: the measured rate jumps from below it to 0.5; raise routing.metric",
    ):
        bisect(lambda s: 0.5 * (s >= 0.3), 0.1)


def calibrated_step(
    rank: int, world: int, plain: dict[str, Any]
) -> tuple[float, float, dict[str, float]]:
    """(strength, rate measured for it) and the metrics of a first step with this noise."""
    config = Config.from_dict(plain)
    with build_components(config) as run:
        run.groups.update_weights(run.policy.weights, version=0)
        strength, rate = study.calibrated_strength(run, 0, TARGET)
        assert run.perturbation is not None
        run.perturbation.options |= {"strength": strength, "target_flip_rate": None}
        perturb_rollout(run.engine, run.perturbation)
        checkpoints = CheckpointManager(run.policy, config.checkpoint, config.run_dir, None)
        trained = train_step(run, LoopState(), checkpoints, Timers())
    return strength, rate, trained.metrics


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2 ep2": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
}


def plain_config(
    model: str, folder: Path, engines: str, parallel: dict[str, Any]
) -> dict[str, Any]:
    return base_config(
        model,
        folder / "run",
        parallel=parallel,
        algorithm={"name": "grpo"},
        rollout={"rollout_batch_size": 32},
        training={"steps": 1, "global_batch_size": 128},
        routing={
            "metric_sequences": 32,
            "compare_rollout": True,
            **noise_section(engines=engines, target_flip_rate=TARGET),
        },
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("calibration")
    model = tiny_model(folder / "model")

    def measure(layout: str, engines: str) -> list[tuple[float, float, dict[str, float]]]:
        processes, parallel = LAYOUTS[layout]
        return run_distributed(
            calibrated_step, processes, plain_config(model, folder, engines, parallel)
        )

    return measure


@pytest.mark.parametrize("engines", ["rollout", "trainer", "both"])
def test_engine_and_trainer_differ_by_the_target(measured: Any, engines: str) -> None:
    """As a training step measures it, on 128 responses of which 32 are of the calibration's
    prompts.
    """
    ((strength, rate, metrics),) = measured("one process", engines)
    assert rate == pytest.approx(TARGET, rel=TOLERANCE)
    assert strength > 0
    assert metrics["routing/rollout_flip_rate"] == pytest.approx(TARGET, abs=0.04)


@pytest.mark.parametrize("layout", ["tp2 ep2", "pp2", "dp2"])
def test_every_rank_and_layout_finds_the_same_strength(measured: Any, layout: str) -> None:
    ((strength, rate, _),) = measured("one process", "both")
    assert [(s, pytest.approx(r)) for s, r, _ in measured(layout, "both")] == [(strength, rate)] * 2
