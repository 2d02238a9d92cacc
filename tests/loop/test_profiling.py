"""Profiles of chosen steps, and the line of a run without memory."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gspo.config import ProfileConfig
from megatron_gspo.errors import RunError
from megatron_gspo.loop.profiling import Profiler, largest_tensors, out_of_memory_explained
from megatron_gspo.parallel.context_parallel import concatenated_ranges


def play(profiler: Profiler, steps: range) -> None:
    for step in steps:
        with profiler.step(step):
            torch.ones(4, 4) @ torch.ones(4, 4)


def traces(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("profile/*"))


def test_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    play(Profiler(ProfileConfig(steps=(2, 3)), tmp_path), range(1, 5))
    assert traces(tmp_path) == ["step_000002_rank_0.json.gz", "step_000003_rank_0.json.gz"]
    with gzip.open(tmp_path / "profile" / "step_000002_rank_0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert any(event["name"] == "aten::mm" for event in events)
    assert any(event["name"] == "[memory]" for event in events)


def test_nothing_is_recorded_without_a_request_or_on_another_rank(tmp_path: Path) -> None:
    play(Profiler(ProfileConfig(), tmp_path), range(1, 4))
    play(Profiler(ProfileConfig(steps=(2,), ranks=(1,)), tmp_path), range(1, 4))
    assert traces(tmp_path) == []


def test_a_signal_records_the_next_step(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    profiler = Profiler(ProfileConfig(), tmp_path)
    with profiler.on_signal():
        with profiler.step(1):
            signal.raise_signal(signal.SIGUSR2)
        play(profiler, range(2, 5))
    assert signal.getsignal(signal.SIGUSR2) is before
    assert traces(tmp_path) == ["step_000002_rank_0.json.gz"]


def policy() -> Any:
    """The parts of a policy that a rank holds between steps."""
    made = SimpleNamespace(chunks=[torch.nn.Linear(1024, 512)], optimizer=None)
    made.trained = {"": made}
    return made


def test_the_largest_tensors_are_named() -> None:
    held = policy()
    other = torch.zeros(1 << 25)  # larger than all others here
    names = largest_tensors(held)
    assert names[0] == "float32 [33554432] of 128.0 MiB" and len(names) == 3
    assert other is not None and "weights of 2.0 MiB" in names


def test_out_of_memory_is_one_line_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised, out_of_memory_explained(policy(), tmp_path):
        torch.empty(1 << 50)
    line = str(raised.value)
    assert line.startswith("out of memory: ") and "\n" not in line
    assert "The largest tensors are " in line
    assert line.endswith(
        "lower training.max_tokens_per_micro_batch or set model.recompute_granularity: full"
    )


def test_the_key_is_that_of_the_part_that_ran(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"set training.log_prob_memory_gib: 0.25"),
        out_of_memory_explained(policy(), tmp_path),
    ):
        concatenated_ranges(torch.tensor([0]), torch.tensor([1 << 50]))


def test_other_errors_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="else"), out_of_memory_explained(policy(), tmp_path):
        raise RuntimeError("something else")
