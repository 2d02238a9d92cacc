"""Bounds of the sections `training`, `optimizer`, `evaluation`, `checkpoint` and `tracking`."""

from __future__ import annotations

import pytest

from tests.config.building import build, refused


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("training.ppo_epochs=0", "integer >= 1"),
        ("training.max_tokens_per_micro_batch=0", "integer >= 1"),
        ("training.micro_batch_size=0", "integer >= 1 or null"),
        ("optimizer.lr=0", "number > 0"),
        ("optimizer.min_lr=-1e-9", "number >= 0"),
        ("optimizer.lr_decay_style=step", "one of constant, linear, cosine"),
        ("optimizer.weight_decay=-0.1", "number >= 0"),
        ("optimizer.adam_beta1=1", "number >= 0, < 1"),
        ("optimizer.adam_eps=0", "number > 0"),
        ("optimizer.clip_grad=-1", "number >= 0"),
        ("evaluation.temperature=-1", "number >= 0"),
        ("evaluation.top_p=0", "number > 0, <= 1"),
        ("evaluation.n_samples=0", "integer >= 1"),
        ("checkpoint.keep=0", "integer >= 1"),
        ("checkpoint.resume=always", "one of auto, never"),
        ("tracking.samples_per_step=-1", "integer >= 0"),
    ],
)
def test_values_out_of_bounds_are_refused(plain: dict, override: str, fix: str) -> None:
    message = refused(plain, override)
    assert message.startswith(f"{override.partition('=')[0]} = ") and f"; set {fix}" in message


def test_values_at_their_bounds_are_not(plain: dict) -> None:
    config = build(
        plain,
        "optimizer.clip_grad=0",
        "optimizer.adam_beta1=0",
        "checkpoint.save_interval=0",
        "evaluation.top_p=1",
        "tracking.wandb=project",
    )
    assert config.optimizer.clip_grad == 0 and config.tracking.wandb == "project"


def test_the_optimizer_steps_of_a_run(plain: dict) -> None:
    assert build(plain, "training.steps=5", "training.ppo_epochs=2").optimizer_steps == 5 * 2 * (
        16 * 8 // 32
    )
