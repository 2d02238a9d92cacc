"""The order of a run's phases, with scripted parts; whole runs are in `tests/train`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_gspo.config import Config
from megatron_gspo.data.prompts import PromptSource
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.loop import training_loop
from megatron_gspo.loop.callbacks import Callback, StoppedRun
from megatron_gspo.loop.checkpoints import LoopState
from megatron_gspo.loop.generation import DataCursor
from megatron_gspo.loop.setup import Components
from megatron_gspo.loop.throughput import StepWork
from megatron_gspo.loop.training_loop import TrainedStep, train
from megatron_gspo.routing_replay.perturbation import load_perturbation
from tests.support.collapse_noise import noise_section
from tests.support.samples import make_prompt, make_sample
from tests.support.training_runs import base_config


class Groups:
    """A source of groups that notes its weight updates. fails_at: version whose update raises."""

    engine_name = "scripted"

    def __init__(self, events: list[str], fails_at: int | None) -> None:
        self.events = events
        self.fails_at = fails_at

    def update_weights(self, stream: Any, *, version: int) -> None:
        self.events.append(f"weights {version}")
        if version == self.fails_at:
            raise SharedEngineError("no server")

    def metrics(self) -> dict[str, float]:
        return {"servers/up": 1.0}

    def close(self) -> None:
        self.events.append("closed")


class Logger:
    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.logged: dict[int, dict[str, float]] = {}
        self.said: list[str] = []
        self.warned: dict[str, str] = {}
        self.summary: dict[str, Any] | None = None

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note_dropped_prompts(self, count: int) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(f"log {step}")
        self.logged[step] = dict(metrics)

    def write_step(self, step: int, *_: object) -> None: ...

    def info(self, line: str) -> None:
        self.said.append(line)

    def info_lines(self, make_lines: Callable[[], Sequence[str]]) -> None: ...

    def warn_once(self, about: str, line: str) -> None:
        self.warned[about] = line

    def finish(self, summary: dict[str, Any]) -> None:
        self.events.append("summary")
        self.summary = summary


class Checkpoints:
    """Every second step is due."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.current = Path("at")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None: ...

    def is_due(self, step: int, last: int) -> bool:
        return step % 2 == 0

    def begin(self, state: LoopState) -> None:
        self.events.append(f"save {state.step}")

    def finish(self) -> None:
        self.events.append("saved")

    @contextlib.contextmanager
    def saved_on_failure(self, state: LoopState) -> Any:
        try:
            yield
        except SharedEngineError:
            self.events.append(f"save {state.step} on failure")
            raise


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`train` with scripted parts: (its state or exception, what happened in order, its logger)."""

    def start(
        *,
        steps: int = 3,
        resumed: int = 0,
        fails_at: int | None = None,
        stop_after: int | None = None,
        low_steps: int = 0,
        sample_size: float = 1.0,
        callbacks: Sequence[str] = (),
        **sections: Any,
    ) -> tuple[Any, list[str], Logger]:
        sections = {
            "checkpoint": {"export_hf": True},
            "evaluation": {"eval_interval": 2},
            **sections,
        }
        plain = base_config("model", tmp_path / "run", training={"steps": steps}, **sections)
        config = Config.from_dict({**plain, "callbacks": list(callbacks)})
        events: list[str] = []
        logger = Logger(events)
        checkpoints = Checkpoints(events)
        prompts = [make_prompt(i) for i in range(4)]
        policy = SimpleNamespace(weights=lambda: iter(()), critic=None, trained_lora=None)
        closes = SimpleNamespace(close=lambda: None, description=None)
        groups: Any = Groups(events, fails_at)
        parts = Components(
            config=config,
            policy=policy,
            reference=None,
            engine=None,
            groups=groups,
            eval_groups=groups,
            rewards=closes,
            eval_rewards=closes,
            prompts=PromptSource(prompts),
            eval_prompts=prompts[:1],
            dropped_prompts=0,
            tokenizer=None,
            perturbation=load_perturbation(config.routing),
        )

        def train_step(run: Components, state: LoopState, *_: object) -> TrainedStep:
            events.append(f"step {state.step}")
            update = SimpleNamespace(metrics={})
            batch = TrainingBatch.of([make_sample(2, 3)])
            metrics = {"entropy": 0.5, "effective_sample_size": sample_size}
            cursor = DataCursor(state.cursor + 4)
            work = StepWork(5, 3, 0.0, 0.0, 0.0)
            return TrainedStep(batch, cursor, SimpleNamespace(), update, work, metrics)

        def evaluate(*_: object) -> dict[str, float]:
            events.append("evaluate")
            return {"eval/accuracy": 0.25 * events.count("evaluate")}

        def requested() -> bool:
            return stop_after is not None and f"step {stop_after - 1}" in events

        for name, replacement in {
            "build_components": lambda config, engine: parts,
            "resume": lambda *_: (
                LoopState(step=resumed, callbacks={"guard": {"low_steps": low_steps}}),
                None,
            ),
            "MetricsLogger": lambda *_, **__: logger,
            "CheckpointManager": lambda *_: checkpoints,
            "train_step": train_step,
            "evaluate": evaluate,
            "check_log_probs": lambda *_, **__: {"log_prob_check/abs_diff": 0.0},
            "perturb_rollout": lambda engine, given: events.append(f"perturb {given.options}"),
            "sole_writer": lambda _: contextlib.nullcontext(),
            "stop_on_signal": lambda: contextlib.nullcontext(requested),
            "shutdown": lambda **_: None,
            "seed_generators": lambda seed, step, phase: events.append(f"seed {step}"),
            "export": lambda policy, folder: events.append("export") or folder,
        }.items():
            monkeypatch.setattr(training_loop, name, replacement)
        monkeypatch.setattr(
            Config, "check", lambda self, world_size: events.append(f"check {world_size}")
        )
        try:
            return train(config), events, logger
        except (SharedEngineError, StoppedRun) as error:
            return error, events, logger

    return start


def test_the_phases_of_a_run_in_order(run: Callable[..., Any]) -> None:
    state, events, logger = run(steps=3)
    assert events == [
        *("check 1", "weights 0", "seed 0", "evaluate", "log 0"),
        *("step 0", "weights 1", "log 1"),
        # Logged before it is saved.
        *("step 1", "weights 2", "seed 2", "evaluate", "log 2", "save 2"),
        *("step 2", "weights 3", "seed 3", "evaluate", "log 3"),
        *("saved", "export", "summary", "closed"),
    ]
    assert (state.step, state.cursor, state.samples, state.tokens) == (3, 12, 3, 15)
    assert (state.accuracy_before, state.accuracy_after) == (0.25, 0.75)
    assert logger.summary["step"] == 3 and logger.summary["exported"].endswith("run/hf")
    assert (
        logger.logged[1].items()
        >= {
            "entropy": 0.5,
            "servers/up": 1.0,
            "log_prob_check/abs_diff": 0.0,
        }.items()
    )
    assert logger.logged[1].keys() >= {"time/step", "time/weight_sync", "perf/tokens"}
    assert json.dumps(logger.summary)


STRONGER = f"{__name__}:Stronger"


class Stronger(Callback):
    """Changes the perturbation when it starts."""

    def start(self, run: Components, step: int) -> None:
        assert run.perturbation is not None
        run.perturbation.options["strength"] = 0.75


def test_the_engine_is_perturbed_after_the_callbacks_start(run: Callable[..., Any]) -> None:
    """And before the first evaluation."""
    _, events, _ = run(steps=1, routing=noise_section(strength=0.5), callbacks=[STRONGER])
    assert events[:4] == ["check 1", "weights 0", "perturb {'strength': 0.75}", "seed 0"]


def test_a_resumed_run_sends_its_weights_and_does_not_evaluate_again(
    run: Callable[..., Any],
) -> None:
    state, events, _ = run(steps=3, resumed=2)
    assert events[:4] == ["check 1", "weights 2", "step 2", "weights 3"] and state.step == 3
    _, events, logger = run(steps=3, resumed=3)
    assert events == ["check 1", "weights 3", "saved", "export", "summary", "closed"]
    assert logger.logged == {}


def test_a_step_whose_engine_fails_afterwards_is_logged_and_saved(run: Callable[..., Any]) -> None:
    error, events, logger = run(steps=3, fails_at=2)
    assert isinstance(error, SharedEngineError) and logger.summary is None
    assert events[-4:] == ["weights 2", "log 2", "save 2 on failure", "closed"]


def test_a_signal_stops_the_run_after_the_step_with_a_checkpoint(run: Callable[..., Any]) -> None:
    state, events, logger = run(steps=3, stop_after=1)
    assert state.step == 1
    assert events[-4:] == ["log 1", "save 1", "saved", "closed"]
    assert logger.summary is None
    assert logger.said == ["stopped by SIGUSR1 after step 1; start again to resume from at"]
    state, events, logger = run(steps=1, stop_after=1)
    assert state.step == 1 and events[-5:] == ["save 1", "saved", "export", "summary", "closed"]


def test_the_guard_warns_and_only_stops_on_request(run: Callable[..., Any]) -> None:
    guard = {"steps": 2}
    state, events, logger = run(steps=3, sample_size=0.25, guard=guard)
    assert [logger.logged[step]["guard/alarm"] for step in (1, 2, 3)] == [0, 1, 1]
    counted = {"guard": {"low_steps": 3}}
    assert state.callbacks == logger.summary["callbacks"] == counted and "summary" in events
    assert logger.warned["guard"].startswith("step 3: effective_sample_size = 0.25 is below 0.5")
    error, events, logger = run(steps=3, sample_size=0.25, guard={**guard, "action": "stop"})
    assert isinstance(error, StoppedRun)
    assert events[-4:] == [
        "log 2",
        "save 2",
        "saved",
        "closed",
    ]
    assert str(error).startswith(
        "step 2: effective_sample_size = 0.25 is below 0.5 for the last 2 steps"
    )
    assert str(error).endswith(
        "; start again to resume from at, with guard.action: warn to go on without a change"
    )
    assert logger.summary is None
    state, _, logger = run(steps=3, sample_size=0.5, guard={**guard, "action": "stop"})
    assert state.step == 3 and logger.logged[3]["guard/alarm"] == 0
    bounded = {"name": "grpo", "rollout_is": "token"}  # has no threshold for the sample size
    state, _, logger = run(
        steps=3, sample_size=0.25, guard={**guard, "action": "stop"}, algorithm=bounded
    )
    assert state.step == 3 and logger.logged[3]["guard/alarm"] == 0


def test_a_resumed_run_counts_the_low_steps_of_before(run: Callable[..., Any]) -> None:
    guard = {"steps": 2, "action": "stop"}
    error, events, _ = run(steps=3, resumed=1, low_steps=1, sample_size=0.25, guard=guard)
    assert isinstance(error, StoppedRun) and events[-3:] == ["save 2", "saved", "closed"]


def test_supervised_training_sends_weights_for_evaluation_only(run: Callable[..., Any]) -> None:
    rollout = {"engine": "sft", "n_samples_per_prompt": 1, "rollout_batch_size": 8}
    _, events, _ = run(
        steps=2,
        algorithm={"name": "sft"},
        rollout=rollout,
        evaluation={"at_start": False},
        checkpoint={"export_hf": False},
    )
    assert events == [
        "check 1",
        "step 0",
        "log 1",
        "step 1",
        "seed 2",
        "weights 2",
        "evaluate",
        "log 2",
        "save 2",
        "saved",
        "summary",
        "closed",
    ]
