"""Callbacks: the example in a run, what they are asked in which order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_gspo.config import Config
from megatron_gspo.loop.callbacks import (
    AfterStep,
    Callback,
    Callbacks,
    add_metrics,
    load_callbacks,
)
from megatron_gspo.loop.checkpoints import LoopState
from megatron_gspo.loop.collapse_guard import collapse_guard
from megatron_gspo.user_code import UserCodeError
from tests.support.training_runs import base_config, launch, records, tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/own_code/callbacks.py:RepeatedResponses"
# Watches the example's metric and keeps what it was asked.
WATCHER = """
from megatron_gspo.loop.callbacks import AfterStep, Callback

class Watcher(Callback):
    def __init__(self):
        self.asked = []

    def start(self, run, step):
        self.asked.append(f"start {step}")

    def after_rollout(self, step, batch):
        self.asked.append(f"rollout {step} of {len(batch)}")
        return {"own/step": float(step)}

    def after_step(self, step, metrics):
        self.asked.append(f"step {step}")
        assert metrics["own/step"] == step - 1 and 0 <= metrics["own/distinct"] <= 1
        return AfterStep({"own/asked": float(len(self.asked))}, warning=f"step {step} is watched")

    def end(self, state):
        with open(FILE, "w") as file:
            file.write(" / ".join([*self.asked, f"end {state.step}"]))

    def state(self):
        return {"asked": self.asked}

    def load_state(self, state):
        self.asked = state["asked"]
"""


def test_a_run_asks_and_a_resumed_run_goes_on(tmp_path: Path):
    model = tiny_model(tmp_path / "model")
    watcher = tmp_path / "watcher.py"
    watcher.write_text(WATCHER.replace("FILE", repr(str(tmp_path / "asked.txt"))))
    config = base_config(
        model,
        tmp_path / "run",
        training={"steps": 1},
        checkpoint={"save_interval": 1, "export_hf": False},
    )
    config["callbacks"] = [EXAMPLE, f"{watcher}:Watcher"]
    life = launch(config)
    assert life.log.count("step 1 is watched") == 1
    launch(config, 1, "training.steps=2")
    assert (tmp_path / "asked.txt").read_text().split(" / ") == [
        *("start 0", "rollout 0 of 16", "step 1", "start 1", "rollout 1 of 16", "step 2", "end 2")
    ]
    by_step = {row["step"]: row for row in records(tmp_path / "run")}
    assert [by_step[step]["own/asked"] for step in (1, 2)] == [3, 6]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["callbacks"].keys() == {"guard", EXAMPLE, f"{watcher}:Watcher"}


def test_the_example_stops_after_three_steps_of_one_answer():
    callback = load_callbacks(SimpleNamespace(callbacks=[EXAMPLE]), {}).named[EXAMPLE]
    stops = [
        callback.after_step(step, {"own/distinct": value}).stop
        for step, value in enumerate([0.0, 0.0, 0.5, 0.0, 0.0, 0.0])
    ]
    assert stops == [""] * 5 + ["step 5: all responses were equal for three steps"]


def test_state_is_given_by_name():
    class Counter(Callback):
        count = 0

        def after_step(self, step, metrics):
            self.count += 1
            return AfterStep()

        def state(self):
            return {"count": self.count}

        def load_state(self, state):
            self.count = state["count"]

    callbacks = Callbacks({"mine": Counter(), "plain": Callback()})
    callbacks.start(None, LoopState(callbacks={"mine": {"count": 4}, "gone": {}}))
    assert callbacks.after_step(1, {}).keys() == {"mine", "plain"}
    assert callbacks.state() == {"mine": {"count": 5}}


def test_the_guard_is_a_callback_unless_it_is_off(tmp_path: Path):
    config = Config.from_dict(base_config("model", tmp_path / "run"))
    assert list(load_callbacks(config, collapse_guard(config)).named) == ["guard"]
    config = Config.from_dict(base_config("model", tmp_path / "run", guard={"action": "off"}))
    assert not load_callbacks(config, collapse_guard(config)).named


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("missing", "has no 'missing'"),
        ("fails", "called with no arguments, it raised ValueError: no"),
        ("number", "made a int; name a subclass of megatron_gspo.loop.callbacks.Callback"),
    ],
)
def test_what_is_refused_at_the_start(tmp_path: Path, function: str, words: str):
    (tmp_path / "own.py").write_text(
        "def fails():\n    raise ValueError('no')\n\ndef number():\n    return 1\n"
    )
    path = f"{tmp_path}/own.py:{function}"
    with pytest.raises(UserCodeError) as error:
        load_callbacks(SimpleNamespace(callbacks=[path]), {})
    assert str(error.value).startswith(f"callbacks = '{path}': ") and words in str(error.value)


def test_a_hook_that_returns_nothing_is_refused():
    class Forgetful(Callback):
        def after_rollout(self, step, batch):
            return None

        def after_step(self, step, metrics):
            return None

    callbacks = Callbacks({"plain": Callback(), "own.py:Forgetful": Forgetful()})
    for hook, result in (("after_rollout", "a dict of metrics"), ("after_step", "AfterStep()")):
        with pytest.raises(UserCodeError) as error:
            getattr(callbacks, hook)(1, {})
        assert str(error.value) == (
            f"callbacks = 'own.py:Forgetful': {hook} returned a NoneType; return {result}"
        )


def test_a_metric_that_the_step_has_already_is_refused():
    by_callback = {"own.py:Watcher": {"own/a": 1.0, "loss": 2.0}}
    with pytest.raises(UserCodeError) as error:
        add_metrics({"loss": 0.5, "grad_norm": 1.0}, by_callback)
    assert str(error.value) == (
        "callbacks = 'own.py:Watcher': its metric 'loss' is one that the step has already; give it"
        " another name"
    )
