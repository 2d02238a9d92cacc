"""Whole runs whose samples are runs of agents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from tests.support.distributed import run_distributed
from tests.support.sglang_generator import Generator
from tests.support.training_runs import (
    base_config,
    check_ledger,
    exported,
    first_step,
    launch,
    records,
    tiny_model,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/agents/spell_backward.py:spell_backward"
AGENTS = f"{ROOT}/tests/support/branching_agent.py"
# So that agents find this file's neighbours.
ENV = {"PYTHONPATH": str(ROOT)}
BRANCHING = {"function": f"{AGENTS}:branching", "env": ENV, "max_calls": 4, "max_context": 160}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def agent_config(model: str, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    agents = {"function": EXAMPLE, "max_calls": 4, "max_context": 80} | sections.pop("agents", {})
    config = base_config(model, run_dir, agents=agents, **sections)
    config["data"]["verifier"] = None
    return config


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A run on the example; calls are drawn one by one, so that it can be repeated bit by bit."""
    config = agent_config(
        model,
        tmp_path_factory.mktemp("runs") / "agents",
        rollout={"max_batch_size": 1},
        parallel={"expert_model_parallel_size": 2},
        training={"steps": 3},
        checkpoint={"save_interval": 2},
        evaluation={"n_samples": 2, "eval_interval": 2},
        tracking={"samples_per_step": 16, "plot": False},
    )
    launch(config, 2)
    return config


def test_a_run_on_the_example(finished: dict[str, Any]) -> None:
    rows = records(finished["run_dir"])
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["agents/rows"] == 16 and row["masked/unscored"] == 0
        assert row["agents/calls"] == 16 * row["turns/mean"]
        assert 1 < row["turns/mean"] <= row["turns/max"] <= 3
        assert row["updates"] == 2
        # every generated token is scored as it was sampled
        assert row["mismatch/abs_diff_max"] < 1e-4
    # A random model seldom earns something.
    assert any(row["grad_norm"] > 0 for row in rows[1:])
    assert {"eval/accuracy"} <= set(rows[0]) & set(rows[-1])
    lines = (Path(finished["run_dir"]) / "samples" / "step_000001.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        messages = sample["metadata"]["messages"]
        turns = sample["metadata"]["turns"]
        assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"
        assert sample["response"] == messages[-1]["content"]
        assert len(turns) == sum(message["role"] == "assistant" for message in messages)
        assert sample["reward"] == pytest.approx(sum(turn["reward"] for turn in turns))


@pytest.mark.slow
def test_a_resumed_run_ends_the_same(finished: dict[str, Any], tmp_path: Path) -> None:
    again = {**finished, "run_dir": str(tmp_path / "again")}
    launch(again, 2, "training.steps=2")
    launch(again, 2)
    assert records(again["run_dir"]) == records(finished["run_dir"])
    ours = exported(again["run_dir"])
    theirs = exported(finished["run_dir"])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for file in sorted((Path(finished["run_dir"]) / "samples").iterdir()):
        assert (tmp_path / "again" / "samples" / file.name).read_bytes() == file.read_bytes()


def one_step(rank: int, world: int, plain: dict[str, Any]) -> tuple[list[Sample], dict[str, float]]:
    """The samples as they are trained on and the metrics of a step."""
    return first_step(Config.from_dict(plain))


def test_runs_with_branches_are_one_sequence_in_every_layout(model: str, tmp_path: Path) -> None:
    config = agent_config(
        model,
        tmp_path / "run",
        agents=BRANCHING,
        rollout={"max_batch_size": 1, "rollout_batch_size": 2},
        routing={"replay": "r3"},
        training={"steps": 1, "global_batch_size": 8, "max_tokens_per_micro_batch": 640},
    )
    [(samples, metrics)] = run_distributed(one_step, 1, config)
    assert len(samples) == 8
    for sample in samples:
        assert sample.num_rows == 3 and len(sample.metadata["turns"]) == 4
        assert sample.routed_experts is not None
        assert len(set(sample.advantages.tolist())) == 1  # of the run
        trained = int(sample.loss_mask.sum())
        turns = sample.metadata["turns"]
        assert trained == sum(turn["end"] - turn["start"] for turn in turns)
    assert metrics["agents/rows"] == 24 and metrics["agents/calls"] == 32
    assert metrics["agents/breaks/new_thread"] == 8
    assert metrics["mismatch/abs_diff_max"] < 1e-4
    for parallel in (
        {},
        {"context_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ):
        ranks = run_distributed(one_step, 2, {**config, "parallel": parallel})
        for other_samples, other_metrics in ranks:
            for name in ("loss", "grad_norm", "reward/mean", "turns/mean"):
                assert other_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), name
            # A pipeline's first stage has none.
            for a, b in zip(samples, other_samples, strict=bool(other_samples)):
                assert a.tokens.tolist() == b.tokens.tolist()
                np.testing.assert_allclose(a.old_log_probs, b.old_log_probs, atol=2e-5)


@pytest.mark.parametrize("worth", [None, pytest.param(-1.0, marks=pytest.mark.slow)])
def test_agents_that_fail_are_counted(model: str, tmp_path: Path, worth: float | None) -> None:
    config = agent_config(
        model,
        tmp_path / "run",
        agents={"function": f"{AGENTS}:failing", "env": ENV, "run_timeout": 20.0},
        data={"verifier_failure_reward": worth},
        training={"steps": 1},
        evaluation={"at_start": False, "at_end": False},
    )
    done = launch(config)
    [row] = records(config["run_dir"])
    assert (row["verifier/error"], row["verifier/timeout"]) == (4, 4)
    assert row["masked/unscored"] == (8 if worth is None else 0)
    assert row["reward/mean"] == pytest.approx(0.5 if worth is None else (8 * 0.5 - 8) / 16)
    assert "8 of 16 responses could not be scored" in done.log


def test_agents_that_always_fail_end_the_run(model: str, tmp_path: Path) -> None:
    agents = {"command": ["python", "-c", "raise SystemExit('no such tool')"], "function": None}
    done = launch(agent_config(model, tmp_path / "run", agents=agents), check=False)
    assert not done.finished
    assert "the agent failed on all 8 responses of a batch" in done.log
    assert "error: the agent made no call (exit code 1: no such tool)" in done.log


def test_all_servers_are_gone(model: str, tmp_path: Path) -> None:
    """In the second step. Calls wait for `recovery_timeout`; the run saves, ends with one line, and
    resumes when a server is back."""
    with Generator() as server:

        def go_away(answer: dict[str, Any]) -> dict[str, Any]:
            if len(server.bodies) > 20:
                server.refuses.add("")
            return answer

        server.always = go_away
        config = agent_config(
            model,
            tmp_path / "run",
            rollout={"engine": "sglang"},
            sglang={
                "urls": [server.url],
                "weight_transport": "tensor",
                "log_prob_check_at_start": False,
                "recovery_timeout": 3.0,
            },
            agents={"function": f"{AGENTS}:single", "env": ENV},
            evaluation={"at_start": False, "at_end": False},
        )
        done = launch(config, check=False)
        assert done.codes == [1]
        [line] = [line for line in done.log.splitlines() if line.startswith("error: ")]
        checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
        assert re.match("error: no server has answered for 3 s: ", line), line
        assert str(checkpoint) in line and "start again" in line and checkpoint.is_dir()
        assert "Traceback" not in done.log
        assert len(records(config["run_dir"])) == 1
        server.always = None
        server.refuses.clear()
        again = launch(config)
    assert f"resumed from {checkpoint}: step" in again.log
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=0)
    assert [row["step"] for row in records(config["run_dir"])] == [1, 2, 3]
