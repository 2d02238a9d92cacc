"""Whole runs whose samples are episodes: on the example's environment, and with environments
that fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop import training_loop
from tests.support.distributed import run_distributed
from tests.support.training_runs import (
    base_config,
    exported,
    first_step,
    launch,
    records,
    tiny_model,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/environments/spell_backward.py:spell_backward"
ROLLOUT = {
    "environment": EXAMPLE,
    "environment_options": {"tries": 3, "partial_credit": True},
    "max_turns": 3,
    "max_turn_length": 6,
    "max_response_length": 60,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def multi_turn(model: str, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    algorithm = {"name": "gspo_token", "turn_discount": 0.5} | sections.pop("algorithm", {})
    config = base_config(model, run_dir, algorithm=algorithm, **sections)
    config["rollout"] |= ROLLOUT | sections.get("rollout", {})
    config["data"]["verifier"] = None
    return config


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    config = multi_turn(
        model,
        tmp_path_factory.mktemp("runs") / "episodes",
        data={"verifier_timeout": 20.0},
        parallel={"expert_model_parallel_size": 2},
        checkpoint={"save_interval": 2},
        evaluation={"n_samples": 2, "eval_interval": 2},
        tracking={"samples_per_step": 16, "plot": False},
    )
    launch(config, 2)
    return config


def test_a_run_on_the_example(finished):
    steps = records(finished["run_dir"])
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    for row in steps[1:]:
        assert 1 < row["turns/mean"] <= row["turns/max"] <= 3
        assert row["turns/observation_tokens"] > 10 and row["updates"] == 2 and row["grad_norm"] > 0
        # every generated token scored as it was sampled, wherever it stands in its episode
        assert row["mismatch/abs_diff_max"] < 1e-4
        assert not any(name.startswith("verifier/") and value for name, value in row.items())
    assert {"eval/accuracy"} <= set(steps[0]) & set(steps[-1])
    lines = (Path(finished["run_dir"]) / "samples" / "step_000001.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        turns = sample["metadata"]["turns"]
        assert sample["response"].count("\nnot ") == len(turns) - 1
        assert sample["reward"] == pytest.approx(sum(turn["reward"] for turn in turns))
        assert turns[-1]["end"] == sample["response_length"] and turns[0]["start"] == 0


@pytest.mark.slow
def test_a_resumed_run_ends_the_same(finished, tmp_path):
    again = {**finished, "run_dir": str(tmp_path / "again")}
    launch(again, 2, "training.steps=2")
    launch(again, 2)
    assert records(again["run_dir"]) == records(finished["run_dir"])
    ours, theirs = (exported(config["run_dir"]) for config in (again, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def one_step(
    rank: int, world: int, plain: dict[str, Any], disturb: bool
) -> tuple[list[Sample], dict[str, float]]:
    """The samples as they are trained on and the metrics of a step; disturb: nonsense at every
    observation token.
    """
    if disturb:
        optimizer_steps = training_loop.run_optimizer_steps
        training_loop.run_optimizer_steps = lambda policy, batch, *rest: optimizer_steps(
            policy, disturbed(batch), *rest
        )
    return first_step(Config.from_dict(plain))


def disturbed(batch: TrainingBatch) -> TrainingBatch:
    loss_mask = batch.responses["loss_mask"]
    for name, value in {
        "advantages": 1e3,
        "old_log_probs": -50.0,
        "rollout_log_probs": -9.0,
    }.items():
        column = np.where(loss_mask, batch.responses[name], value).astype(np.float32)
        batch = batch.with_column(name, column)
    return batch


@pytest.fixture(scope="module")
def step(model, tmp_path_factory):
    training = {"steps": 1, "global_batch_size": 16, "max_tokens_per_micro_batch": 4096}
    config = multi_turn(model, tmp_path_factory.mktemp("step") / "run", training=training)
    return config, *run_distributed(one_step, 1, config, False)[0]


def test_observations_have_no_gradient(step):
    config, samples, metrics = step
    [(_, disturbed)] = run_distributed(one_step, 1, config, True)
    assert sum(int((~sample.loss_mask).sum()) for sample in samples) > 100
    assert metrics["grad_norm"] > 1e-3
    for name in ("loss", "grad_norm", "ratio_max", "kl/old_policy"):
        assert disturbed[name] == metrics[name], name


def test_the_layout_does_not_matter(step):
    config, samples, metrics = step
    narrow = {
        **config,
        "training": {"steps": 1, "global_batch_size": 16, "max_tokens_per_micro_batch": 100},
    }
    runs = run_distributed(one_step, 2, narrow, False)
    runs += run_distributed(
        one_step, 2, {**narrow, "parallel": {"context_parallel_size": 2}}, False
    )
    for others, other_metrics in runs:
        for a, b in zip(samples, others, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.loss_mask.tolist() == b.loss_mask.tolist()
            np.testing.assert_allclose(a.advantages, b.advantages, rtol=1e-5)
        for name in ("loss", "grad_norm", "reward/mean", "turns/mean"):
            assert other_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), name


def test_turns_have_advantages_of_their_own(step):
    """First turns and second turns are compared with their like; the loss is the mean over an
    episode's tokens.
    """
    _, samples, metrics = step
    returns = [[span.reward for span in spans(sample)] for sample in samples]
    for values in returns:
        for k in range(len(values) - 2, -1, -1):
            values[k] += 0.5 * values[k + 1]
    means = []
    for sample, turn_returns in zip(samples, returns, strict=True):
        tokens = []
        for k, span in enumerate(spans(sample)):
            peers = [
                r[k]
                for s, r in zip(samples, returns, strict=True)
                if s.prompt_index == sample.prompt_index and len(r) > k
            ]
            spread = np.std(peers, ddof=1) if len(peers) > 1 else 0.0
            wanted = (turn_returns[k] - np.mean(peers)) / spread if max(peers) > min(peers) else 0.0
            np.testing.assert_allclose(sample.advantages[span.start : span.end], wanted, atol=1e-5)
            tokens += [wanted] * (span.end - span.start)
        means.append(np.mean(tokens))
    assert metrics["loss"] == pytest.approx(-np.mean(means), rel=1e-4, abs=1e-6)
    assert any(len(set(sample.advantages[sample.loss_mask].tolist())) > 1 for sample in samples)


def test_a_conversation_with_two_rows_is_one_sequence(model, tmp_path):
    environment = f"{Path(__file__).parent}/conversing_environment.py:Conversing"
    config = multi_turn(
        model,
        tmp_path / "run",
        rollout={"environment": environment, "environment_options": {}},
        routing={"replay": "r3"},
        training={"steps": 1, "global_batch_size": 16, "max_tokens_per_micro_batch": 640},
    )
    [(samples, metrics)] = run_distributed(one_step, 1, config, False)
    for sample in samples:
        assert sample.num_rows == 2 and len(spans(sample)) == 3
        assert [message["role"] for message in sample.metadata["messages"]] == ["user", "assistant"]
    assert (metrics["agents/calls"], metrics["agents/rows"]) == (48, 32)
    assert metrics["agents/breaks/new_thread"] == 16
    assert metrics["turns/mean"] == 3 and metrics["grad_norm"] > 0
    # every generated token scored as it was sampled, whichever row has it
    assert metrics["mismatch/abs_diff_max"] < 1e-4


FAILING = f"{Path(__file__).parent}/failing_environment.py:failing"


@pytest.mark.parametrize("worth", [None, pytest.param(-1.0, marks=pytest.mark.slow)])
def test_environments_that_fail_are_counted(model, tmp_path, worth):
    config = multi_turn(
        model,
        tmp_path / "run",
        data={"verifier_failure_reward": worth, "verifier_timeout": 2.0},
        rollout={"environment": FAILING, "environment_options": {}},
        training={"steps": 1},
        evaluation={"at_start": False, "at_end": False},
    )
    done = launch(config)
    [row] = records(config["run_dir"])
    assert (row["verifier/error"], row["verifier/timeout"], row.get("verifier/invalid", 0)) == (
        4,
        4,
        0,
    )
    assert row["masked/unscored"] == (8 if worth is None else 0)
    assert "8 of 16 responses could not be scored" in done.log
    assert row["reward/mean"] == pytest.approx(0.5 if worth is None else (8 * 0.5 - 8) / 16)


def test_environments_that_always_fail_end_the_run(model, tmp_path):
    rollout = {"environment": FAILING, "environment_options": {"always": True}}
    done = launch(multi_turn(model, tmp_path / "run", rollout=rollout), check=False)
    assert not done.finished
    assert f"environment '{FAILING}' failed on all" in done.log
    assert "ValueError: no such tool" in done.log
