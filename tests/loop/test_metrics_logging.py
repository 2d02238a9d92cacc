"""What rank 0 writes of a run and prints of a step, and that other ranks write nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_gspo.config import Config, RoutingConfig, load_config
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import DiskError
from megatron_gspo.loop.generation import DataCursor
from megatron_gspo.loop.metrics_logging import MetricsLogger, ratio_arrays
from megatron_gspo.loop.optimizer_steps import Update
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.rewards.scorer import FAILURE
from tests.support.collapse_noise import NOISE, noise_section
from tests.support.samples import make_prompt, make_sample
from tests.support.training_runs import base_config

TOKENIZER: Any = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")
PROMPTS = [make_prompt(i) for i in range(6)]
ROUTING = RoutingReplay(RoutingConfig(), None, True)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(number: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: number)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    become(0)
    return become


def logger(folder: Path, *, resume_step: int = 0, **sections: Any) -> MetricsLogger:
    config = Config.from_dict(base_config("model", folder, **sections))
    return MetricsLogger(config, PROMPTS, TOKENIZER, resume_step=resume_step)


def samples(count: int = 6) -> list[Any]:
    return [
        make_sample(2, 3, seed=i, prompt_index=i, reward=float(i), text=f"text {i}")
        for i in range(count)
    ]


def update_of(batch: list[Any]) -> Update:
    mini_batch = TrainingBatch.of(batch)
    if not batch:
        return Update({}, mini_batch)
    log_probs = mini_batch.responses["old_log_probs"] + np.float32(0.5)
    return Update({}, mini_batch, log_probs)


def test_a_run_directory(rank: Any, tmp_path: Path) -> None:
    with logger(tmp_path / "run", tracking={"samples_per_step": 3, "ratio_interval": 2}) as made:
        for step in (1, 2):
            made.log(step, {"reward/mean": step / 4})
            made.write_step(
                step, TrainingBatch.of(samples()), ROUTING, update_of(samples(2)), DataCursor(6)
            )
        made.finish({"step": 2})
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}]
    assert load_config(run / "config.yaml") == made._config
    written = [
        json.loads(line)
        for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(written) == 3
    assert [row["reward"] for row in written] == sorted(row["reward"] for row in written)
    assert [file.name for file in (run / "ratios").iterdir()] == ["step_000002.npz"]
    assert json.loads((run / "summary.json").read_text()) == {"step": 2, "exit": "finished"}
    assert not (run / "rollouts.jsonl").exists() and not (run / "routing.jsonl").exists()


def test_a_perturbation_is_said(rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    logger(tmp_path / "run", routing=noise_section(strength=0.5)).__exit__()
    words = f"routing.perturbation: {NOISE} changes the choices of the routers"
    assert f"{words}\n" in capsys.readouterr().err
    servers = {"rollout": {"engine": "sglang"}, "sglang": {"num_servers": 1}}
    logger(tmp_path / "other", routing=noise_section(strength=0.5), **servers).__exit__()
    assert f"{words} of the trainer alone\n" in capsys.readouterr().err


def test_servers_samples_are_in_the_rollout_log(rank: Any, tmp_path: Path) -> None:
    sections = {"rollout": {"engine": "sglang"}, "sglang": {"urls": ["http://a:1"]}}
    with logger(tmp_path / "run", tracking={"samples_per_step": 0}, **sections) as made:
        made.write_step(
            1, TrainingBatch.of(samples(2)), ROUTING, update_of([]), DataCursor(6, (3, 5))
        )
    (row,) = map(json.loads, (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines())
    assert row["step"] == 1 and row["pending"] == [3, 5] and len(row["samples"]) == 2
    assert list((tmp_path / "run" / "samples").iterdir()) == []


def test_another_rank_writes_nothing(
    rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank(1)
    with logger(tmp_path / "run") as made:
        made.note_dropped_prompts(3)
        made.log(1, {"updates": 0.0})
        made.write_step(
            1, TrainingBatch.of(samples()), ROUTING, update_of(samples()), DataCursor(6)
        )
        made.finish({})
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


def test_each_warning_is_printed_once(
    rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unscored = [
        replace(sample, metadata={FAILURE: "timeout: 2 s"}) for sample in samples(2)
    ] + samples(2)
    with logger(tmp_path / "run") as made:
        made.note_dropped_prompts(0)
        made.note_dropped_prompts(3)
        for step in (1, 2):
            made.log(step, {"groups/zero_variance": 1.0, "updates": 0.0})
            made.warn_once("guard", f"step {step}: effective_sample_size = 0.1 is below 0.5")
            made.write_step(step, TrainingBatch.of(unscored), ROUTING, update_of([]), DataCursor(6))
    text = "".join(capsys.readouterr())
    for line in (
        "3 prompts are longer than data.max_prompt_length and were dropped",
        "step 1: the rewards of every group are all equal",
        "step 1: every response is masked, so nothing was updated",
        "step 1: effective_sample_size = 0.1 is below 0.5",
        "step 1: 2 of 4 responses could not be scored (timeout: 2 s)",
    ):
        assert " ".join(text.split()).count(line) == 1, line
    assert "step 2: the" not in text and "step 2: every" not in text and "0 prompts" not in text


def test_equal_rewards_are_no_warning_beside_a_teacher(
    rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"distillation": {"teacher": "teacher"}, "algorithm": {"name": "gspo_token"}}
    with logger(tmp_path / "run", **sections) as made:
        made.log(1, {"groups/zero_variance": 1.0})
    assert "all equal" not in "".join(capsys.readouterr())


def test_steps_that_train_the_value_model_alone_are_no_warning(
    rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logger(tmp_path / "run") as made:
        made.log(1, {"updates": 0.0, "critic/loss": 0.1})
    assert "masked" not in "".join(capsys.readouterr())


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(rank: Any, tmp_path: Path) -> None:
    with logger(tmp_path / "run") as made:
        for step in (1, 2, 3):
            made.log(step, {"x": float(step)})
    with logger(tmp_path / "run", resume_step=2) as made:
        made.log(3, {"x": 9.0})
    rows = [
        json.loads(line)["x"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == [1.0, 2.0, 9.0]


def test_a_file_that_cannot_be_written_is_a_disk_error(rank: Any, tmp_path: Path) -> None:
    with logger(tmp_path / "run") as made:
        (tmp_path / "run" / "samples").rmdir()
        with pytest.raises(
            DiskError, match="samples.*cannot be written: .*don't remove a run's directory"
        ):
            made.write_step(1, TrainingBatch.of(samples()), ROUTING, update_of([]), DataCursor(6))


def test_ratios_of_a_large_mini_batch_are_of_some_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = ratio_arrays(update_of(samples()), TOKENIZER)
    for tokens, chosen in ((18, range(6)), (9, [0, 2, 5]), (2, [0])):
        monkeypatch.setattr("megatron_gspo.loop.metrics_logging._RATIO_TOKENS", tokens)
        ratios = ratio_arrays(update_of(samples()), TOKENIZER)
        assert ratios["sequence"].tolist() == [i for i in chosen for _ in range(3)]
        of_chosen = np.isin(whole["sequence"], chosen)
        assert all(
            np.array_equal(values[of_chosen], ratios[name]) for name, values in whole.items()
        )


def test_ratios_are_of_the_trained_tokens_in_order() -> None:
    batch = [make_sample(1, 3, seed=1, mask=[True, False, True]), make_sample(2, 2, seed=2)]
    flips = np.array([1, 0, -1, 0, 1], dtype=np.int8)
    ratios = ratio_arrays(replace(update_of(batch), flips=flips), TOKENIZER)
    np.testing.assert_allclose(ratios["log_ratio"], 0.5, atol=1e-6)
    assert ratios["sequence"].tolist() == [0, 0, 1, 1]
    assert ratios["flipped"].tolist() == [
        1,
        -1,
        0,
        1,
    ]
    ids = [*batch[0].response_ids[[0, 2]], *batch[1].response_ids]
    assert ratios["token_ids"].tolist() == ids
    assert ratios["token_text"].tolist() == [f"<{i}>" for i in ids]
    advantages = np.concatenate([batch[0].advantages[[0, 2]], batch[1].advantages])
    np.testing.assert_array_equal(ratios["advantage"], advantages)
    assert "flipped" not in ratio_arrays(update_of(batch), TOKENIZER)


def test_a_run_without_checkpoints_says_so(rank: Any, tmp_path: Path, capsys: Any) -> None:
    logger(tmp_path / "a").__exit__()
    said = (
        "warning: checkpoint.save_interval is 0: no checkpoint is written, a run that is killed"
        " starts again from"
    )
    assert capsys.readouterr().err == f"{said} the beginning\n"
    logger(tmp_path / "b", resume_step=4, checkpoint={"export_hf": False}).__exit__()
    kept = "checkpoint.export_hf is false: the trained weights are not kept"
    assert capsys.readouterr().err == f"{said} step 4, and {kept}\n"
    logger(tmp_path / "c", checkpoint={"save_interval": 5}).__exit__()
    assert capsys.readouterr().err == ""


def test_where_the_files_of_an_earlier_run_are_is_said(
    rank: Any, tmp_path: Path, capsys: Any
) -> None:
    for _ in range(2):
        with logger(tmp_path, checkpoint={"save_interval": 5}) as made:
            made.log(1, {"reward/mean": 0.5})
    assert capsys.readouterr().err.count(f"its files are now in {tmp_path}/earlier_1\n") == 1
    assert json.loads((tmp_path / "earlier_1" / "metrics.jsonl").read_text())["reward/mean"] == 0.5
