"""Whole runs with routing replay: what they log and write, and that a killed run resumes with
its routes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_gspo.loop.rollout_cache import _FILE, _read_section
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from megatron_gspo.tracking import read_metrics
from tests.fault_injection.bitwise_diff import first_difference
from tests.fault_injection.kill_and_resume import Reference
from tests.fault_injection.kill_points import Target
from tests.fault_injection.process_harness import live, warm_up
from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import WORD, base_config, tiny_model

LAYERS = 2
EXPERTS = 4
K = 2
UPDATED = ("routing/flip_rate", "routing/flipped_tokens")
FROM_ROLLOUT = ("routing/rollout_flip_rate", "routing/rollout_flipped_tokens")
OF_THE_ROUTER = ("routing/entropy", "routing/load_imbalance")
BYTES = ("routing/replay_bytes", "routing/bytes_moved")
QUANTILES = tuple(
    f"ratio_{level}/{q}"
    for level in ("token", "sequence")
    for q in ("min", "p01", "p50", "p99", "max")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    warm_up()
    return tiny_model(tmp_path_factory.mktemp("model"))


def routing_lines(run_dir: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "routing.jsonl").read_text().splitlines()]


def run_here(config: dict[str, Any], processes: int = 1) -> tuple[list[dict[str, Any]], str]:
    """The metrics and the log of a run on processes that have everything imported already."""
    file = Path(config["run_dir"]).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    shutil.rmtree(file.with_suffix(".life"), ignore_errors=True)
    life = live(file, file.with_suffix(".life"), processes, None, grace=1.0)
    assert life.finished, life.log[-3000:]
    return read_metrics(config["run_dir"]), life.log


def check_lines(lines: list[dict[str, Any]], *, rollout: bool) -> None:
    for line in lines:
        assert len(line["flip_rate"]) == len(line["entropy"]) == LAYERS
        assert np.shape(line["load"]) == (LAYERS, EXPERTS)
        assert np.sum(line["load"], axis=1) == pytest.approx([1.0] * 2)
        assert all(0.0 < value <= np.log(EXPERTS) for value in line["entropy"])
        assert (
            len(line["rollout_flip_rate"]) == LAYERS
            if rollout
            else line["rollout_flip_rate"] is None
        )


def test_r2_on_four_processes(model, tmp_path):
    """With a learning rate of nearly nothing every ratio stays 1 and no route flips."""
    config = base_config(
        model,
        tmp_path / "r2",
        algorithm={"name": "grpo"},
        routing={"replay": "r2"},
        optimizer={"lr": 1e-12},
        training={"steps": 2},
        parallel={"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        evaluation={"at_start": False, "at_end": False},
        tracking={"ratio_interval": 2, "detailed_timers": True, "plot": False},
        checkpoint={"save_interval": 2},
    )
    steps, _ = run_here(config, 4)
    assert len(steps) == 2
    for row in steps:
        assert {*UPDATED, *OF_THE_ROUTER, *BYTES, *QUANTILES, "time/routing"} <= set(row)
        assert not {*FROM_ROLLOUT, "routing/missing_routes"} & set(row)
        assert row["log_ratio/first_update"] == 0.0
        assert all(row[name] == pytest.approx(1.0, abs=1e-5) for name in QUANTILES)
        assert (
            row["routing/flip_rate"]
            == row["routing/flipped_tokens"]
            == row["clip_fraction/tokens"]
            == 0.0
        )
        tokens = row["perf/tokens"] - 16  # of 16 samples the last token has no route
        assert row["routing/replay_bytes"] == tokens * LAYERS * K and row["routing/bytes_moved"] > 0
        parts = [row[f"time/{phase}"] for phase in ("forward", "backward", "optimizer")]
        assert min(parts) > 0 and sum(parts) < row["time/train"]
    lines = routing_lines(config["run_dir"])
    assert [line["step"] for line in lines] == [1, 2]
    check_lines(lines, rollout=False)
    files = sorted(path.name for path in (tmp_path / "r2" / "ratios").iterdir())
    assert files == ["step_000002.npz"]


def test_selections_of_sparse_attention_are_compared_with_the_old_policys(tmp_path):
    """The first update has the old policy's weights, the second one others. The engine has the old
    policy's, and may choose otherwise among positions with the same score.
    """
    tokenizer = character_tokenizer([WORD])
    path = save_tiny_model(
        tmp_path / "model",
        "glm_dsa",
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(path)
    shares = {}
    for batch_size in (16, 8):
        config = base_config(
            path,
            tmp_path / f"batches_of_{batch_size}",
            optimizer={"lr": 1e-2},
            training={"steps": 1, "global_batch_size": batch_size},
            evaluation={"at_start": False, "at_end": False},
        )
        [row], _ = run_here(config)
        shares[batch_size] = row["routing/selection_flip_rate"]
        assert row["routing/rollout_selection_flip_rate"] < 0.01
    assert shares[16] == 0.0 < shares[8] < 1.0


def test_without_replay_flips_are_measured_on_a_sample(model, tmp_path):
    config = base_config(
        model,
        tmp_path / "none",
        algorithm={"name": "grpo"},
        routing={"metric_sequences": 3},
        optimizer={"lr": 5e-2},
        training={"steps": 2, "ppo_epochs": 2},
        evaluation={"at_start": False, "at_end": False},
        checkpoint={"save_interval": 1},
    )
    steps, _ = run_here(config)
    assert steps[0]["routing/flipped_tokens"] >= steps[0]["routing/flip_rate"] > 0, (
        "routers that moved flip"
    )
    for row in steps:
        assert {*UPDATED, *OF_THE_ROUTER, *BYTES, *QUANTILES, "time/routing"} <= set(row)
        absent = {
            *FROM_ROLLOUT,
            "routing/missing_routes",
            "time/forward",
            "time/backward",
            "time/optimizer",
        }
        assert not absent & set(row)
        assert 0 < row["routing/replay_bytes"] < (row["perf/tokens"] - 16) * LAYERS * K / 2, (
            "3 of 16 sequences"
        )
    check_lines(routing_lines(config["run_dir"]), rollout=False)
    # rollouts that were kept without routes are of no use to R3
    shutil.rmtree(Path(config["run_dir"]) / "checkpoints" / "step_000002")
    steps, log = run_here({**config, "routing": {"replay": "r3"}})
    assert "not used: the engine's routes has changed" in log and len(steps) == 2
    assert not {*FROM_ROLLOUT} & set(steps[0]) and {*FROM_ROLLOUT} <= set(steps[1])


def still_config(model: str, run_dir: Path, old: str, **sections: Any) -> dict[str, Any]:
    """One step in which the weights hardly move."""
    return base_config(
        model,
        run_dir,
        algorithm={"name": "grpo", "old_log_probs": old},
        optimizer={"lr": 1e-12},
        training={"steps": 1},
        evaluation={"at_start": False, "at_end": False},
        tracking={"ratio_interval": 1, "plot": False},
        **sections,
    )


@pytest.mark.parametrize(
    ("old", "more"),
    [
        ("recompute", {"storage": "host"}),
        ("recompute", {"replay_old_log_probs": False}),
        ("rollout", {}),
    ],
)
def test_r3(model, tmp_path, old, more):
    """The engine computes what the training engine does, so that routes are the same, replayed
    or not.
    """
    config = still_config(model, tmp_path / "run", old, routing={"replay": "r3", **more})
    (row,), _ = run_here(config)
    assert {*UPDATED, *FROM_ROLLOUT, *OF_THE_ROUTER, *BYTES, *QUANTILES} <= set(row)
    assert all(row[name] == pytest.approx(1.0, abs=1e-5) for name in QUANTILES)
    assert (
        row["routing/rollout_flip_rate"]
        == row["routing/flip_rate"]
        == row["clip_fraction/tokens"]
        == 0.0
    )
    assert row["routing/replay_bytes"] == (row["perf/tokens"] - 16) * LAYERS * K
    check_lines(routing_lines(config["run_dir"]), rollout=True)
    assert (tmp_path / "run" / "ratios" / "step_000001.npz").is_file()


def test_without_an_old_policys_pass_a_few_sequences_are_enough(model, tmp_path):
    """Of two data-parallel ranks one has nothing to look at."""
    config = still_config(model, tmp_path / "run", "rollout", routing={"metric_sequences": 1})
    (row,), _ = run_here(config, 2)
    assert {*UPDATED, *OF_THE_ROUTER, *BYTES, "time/routing"} <= set(row)
    assert "time/log_probs" not in row
    assert row["routing/flip_rate"] == 0.0
    assert 0 < row["routing/replay_bytes"] <= 38 * LAYERS * K, "of one prompt and response"
    check_lines(routing_lines(config["run_dir"]), rollout=False)


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory) -> Reference:
    """Four steps with R3 on two processes (TP 2, EP 2), checkpoints after the second and the
    last.
    """
    return Reference(
        tmp_path_factory.mktemp("runs"),
        2,
        [
            "algorithm.name=grpo",
            "routing.replay=r3",
            "training.steps=4",
            "training.ppo_epochs=2",
            "optimizer.lr=1e-2",
            "evaluation.eval_interval=0",
            "evaluation.at_start=false",
            "evaluation.at_end=false",
            "tracking.ratio_interval=1",
            "checkpoint.async_save=false",  # the second step's is whole before the third begins, on a slow disk as well
        ],
    )


def same_routing(run_dir: Path, other: Path) -> bool:
    """routing.jsonl and ratios/ are the same."""
    if routing_lines(run_dir) != routing_lines(other):
        return False
    names = sorted(path.name for path in (other / "ratios").iterdir())
    assert len(names) == 4 and names == sorted(path.name for path in (run_dir / "ratios").iterdir())
    for name in names:
        with np.load(run_dir / "ratios" / name) as a, np.load(other / "ratios" / name) as b:
            if set(a) != set(b) or any(a[key].tobytes() != b[key].tobytes() for key in a):
                return False
    return True


def test_a_killed_run_goes_on_with_the_routes_it_had(reference, tmp_path):
    """Killed in the third step's updates, after the second step's checkpoint had taken that
    step's rollouts.
    """
    run_dir = tmp_path / "run"
    target = Target("update", round(0.7 * reference.life.counts[0]["update"]), 0, True)
    assert live(reference.config(run_dir), tmp_path / "killed", 2, target, grace=0.5).was_killed
    kept = run_dir / "checkpoints" / "step_000002" / _FILE
    with kept.open("rb") as file:
        head = json.loads(file.readline())
        head["start"] = file.tell() + head["rows"][0] * head["rows"][1]
    samples = [
        s for part in range(len(head["parts"])) for s in _read_section(kept, head, part).values()
    ]
    assert len(samples) == 16
    assert all(sample.routed_experts.shape == (sample.length - 1, LAYERS, K) for sample in samples)
    life = live(reference.config(run_dir), tmp_path / "life", 2, None, grace=1.0)
    assert life.finished and "used; they are not generated again" in life.log, life.log[-3000:]
    assert first_difference(run_dir, reference.run_dir) == ""
    assert same_routing(run_dir, reference.run_dir)


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(reference, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(reference.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_000004")
    stale = run_dir / "ratios" / "step_000009.npz"
    stale.write_bytes(b"of a longer life")
    with (run_dir / "routing.jsonl").open("a") as file:
        file.write('{"step": 9, "flip_rate": null}\n')
    life = live(reference.config(run_dir), tmp_path / "life", 2, None, grace=1.0)
    assert life.finished and not stale.exists(), life.log[-3000:]
    assert first_difference(run_dir, reference.run_dir) == ""
    assert same_routing(run_dir, reference.run_dir)
