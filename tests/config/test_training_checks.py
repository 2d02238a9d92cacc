"""Batches, the optimizer's schedule, evaluation and the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.building import ENVIRONMENT, PPO, assert_refused, build, refused


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["training.global_batch_size=48"], "training.global_batch_size = 48:", "divisor of 128"),
        (
            ["model.recompute_num_layers=2"],
            "model.recompute_num_layers = 2:",
            "recompute_granularity: full",
        ),
        (["optimizer.min_lr=1e-7"], "optimizer.min_lr = 1e-07:", "linear or cosine"),
        (
            ["optimizer.min_lr=1.0", "optimizer.lr_decay_style=cosine"],
            "optimizer.min_lr = 1.0:",
            "lower it",
        ),
        (["optimizer.lr_warmup_steps=13"], "optimizer.lr_warmup_steps = 13:", "lower it"),
        (["critic.lr=1e-4"], "critic.lr = 0.0001:", "algorithm.name: ppo"),
        ([*PPO, "critic.lr_warmup_steps=13"], "critic.lr_warmup_steps = 13:", "lower it"),
        ([*PPO, "critic.min_lr=1e-7"], "critic.min_lr = 1e-07:", "set critic.lr_decay_style"),
        ([*PPO, "critic.warmup_steps=3"], "critic.warmup_steps = 3:", "lower it"),
        (
            ["evaluation.eval_interval=1", "data.task.eval_size=0"],
            "evaluation.eval_interval = 1:",
            "data.eval_prompts",
        ),
        (
            ["evaluation.n_samples=4", "evaluation.temperature=0"],
            "evaluation.n_samples = 4:",
            "temperature",
        ),
        (
            ["evaluation.verifier=exact_match", "data.task.eval_size=0"],
            'evaluation.verifier = "exact_match":',
            "data.eval_prompts",
        ),
        (
            ["evaluation.verifier=exact_match", "data.verifier=null", ENVIRONMENT],
            'evaluation.verifier = "exact_match":',
            "remove it",
        ),
        (
            ["evaluation.verifier_options={style: boxed}"],
            "evaluation.verifier_options =",
            "set evaluation.verifier",
        ),
        (["evaluation.pass_at_k=[1, 4]"], "evaluation.pass_at_k = [1, 4]:", "n_samples"),
    ],
)
def test_contradictions_are_refused_at_load(
    plain: dict, overrides: list[str], key: str, fix: str
) -> None:
    assert_refused(plain, overrides, key, fix)


def test_longest_sequence_must_fit_the_budget(plain: dict) -> None:
    cp = "parallel.context_parallel_size=4"  # 32 + 63 = 95 tokens, padded to a multiple of 8: 96
    short = "rollout.max_response_length=63"
    build(plain, short, "training.max_tokens_per_micro_batch=95").check(4)
    assert "set at least 96" in refused(
        plain, cp, short, "training.max_tokens_per_micro_batch=95", world_size=4
    )
    build(plain, cp, short, "training.max_tokens_per_micro_batch=96").check(4)
    build(
        plain, cp, short, "training.max_tokens_per_micro_batch=1", "training.micro_batch_size=1"
    ).check(4)


def test_fixed_micro_batches_fill_every_rank(plain: dict) -> None:
    build(plain, "training.micro_batch_size=8").check(4)  # 32 sequences = 4 ranks x 8
    assert "set a multiple of 64" in refused(plain, "training.micro_batch_size=16", world_size=4)
    assert "set at least 64" in refused(plain, world_size=64)


def test_a_run_directory_holds_one_run(plain: dict, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    build(plain).check(1)
    assert "holds another run; choose another run_dir" in refused(
        plain, "checkpoint.resume=never", world_size=1
    )
    used = tmp_path / "used"
    # Of a run whose records were removed.
    (used / "checkpoints" / "step_000100").mkdir(parents=True)
    never = ("checkpoint.resume=never", f"run_dir={used}")
    assert "holds another run; choose another run_dir" in refused(plain, *never, world_size=1)
    assert "metrics.jsonl is a file" in refused(
        plain, f"run_dir={run}/metrics.jsonl/x", world_size=1
    )
