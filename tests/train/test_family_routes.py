"""A step of each family on the routes that its engine recorded (R3): trainer and engine choose
the same experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_gspo.config import Config
from megatron_gspo.models import family_of, read_config
from tests.support.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import base_config, first_step, tiny_model

KINDS = (
    "shared",
    "deepseek",
    "moonlight",
    "kimi_k2",
    "glm_lite",
    "glm",
    "minimax",
    "gpt_oss",
    "next",
    "qwen35_moe",
)
QUANTILES = tuple(
    f"ratio_{level}/{q}" for level in ("token", "sequence") for q in ("min", "p50", "max")
)


def save_model(folder: Path, kind: str, tokenizer: Path) -> str:
    """A random model with the tokenizer of the other tests; Kimi-K2 is a DeepSeek-V3 under
    another name.
    """
    words = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    sizes = dict(seed=24, initializer_range=0.1, vocab_size=words)
    save_tiny_model(folder, "deepseek" if kind == "kimi_k2" else kind, **sizes)
    for file in tokenizer.glob("token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    if kind == "kimi_k2":
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def one_step(
    rank: int, world: int, config: dict[str, Any]
) -> tuple[list[np.ndarray], dict[str, float]]:
    """The routes of the samples that a run was trained on, and the metrics of its step."""
    samples, metrics = first_step(Config.from_dict(config))
    return [sample.routed_experts for sample in samples], metrics


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_model(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.slow  # tests/equivalence and tests/rollout/embedded have its parts
@pytest.mark.parametrize("kind", KINDS)
def test_trainer_and_engine_have_one_route_and_one_log_prob(
    kind: str, tokenizer: Path, tmp_path: Path
) -> None:
    """In a step in which the weights hardly move."""
    model = save_model(tmp_path / "model", kind, tokenizer)
    config = base_config(
        model,
        tmp_path / "run",
        algorithm={"name": "grpo"},
        routing={"replay": "r3"},
        optimizer={"lr": 1e-12},
        training={"steps": 1},
        parallel=dict(tensor_model_parallel_size=2, expert_model_parallel_size=2),
    )
    routes, metrics = run_distributed(one_step, 2, config)[0]
    _, shape = family_of(read_config(model))
    check(routes, metrics, sum(shape.moe_layers), shape.experts_per_token)


def check(routes: list[np.ndarray], metrics: dict[str, float], layers: int, k: int) -> None:
    """The trainer's own choice, which replay does not use, is the engine's, and so are its
    log-probs.
    """
    assert {route.shape[1:] for route in routes} == {(layers, k)} and len(routes) == 16
    assert len(np.unique(np.concatenate(routes), axis=0)) > 10
    assert metrics["routing/rollout_flip_rate"] == metrics["routing/flip_rate"] == 0.0
    assert metrics["mismatch/abs_diff_max"] < 1e-4
    assert all(metrics[name] == pytest.approx(1.0, abs=1e-5) for name in QUANTILES)
    assert np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
