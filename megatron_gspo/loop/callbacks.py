"""Callbacks: code that watches a run from its start to its end, the user's or the collapse guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_gspo.config import Config
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import RunError
from megatron_gspo.user_code import UserCodeError, call_for_trial, load_user_function

if TYPE_CHECKING:
    from megatron_gspo.loop.checkpoints import LoopState
    from megatron_gspo.loop.setup import Components

KEY = "callbacks"


class StoppedRun(RunError):
    """A callback ended the run, after a checkpoint."""


@dataclass(frozen=True)
class AfterStep:
    """What a callback asks for after a step, the same on every rank."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that are written with those of the step."""

    warning: str = ""
    """A line, printed the first time that the callback has one."""

    stop: str = ""
    """Why the run ends with an error, after a checkpoint."""

    resume_hint: str = ""
    """What that error adds to how the run is resumed."""


class Callback:
    """Base class. Every hook runs on every rank, in the same order, so it may use collectives."""

    def start(self, run: Components, step: int) -> None:
        """Before the first evaluation and step of this process. step: of the checkpoint, 0 in a new
        run."""

    def after_rollout(self, step: int, batch: SampleBatch) -> Mapping[str, float]:
        """After a rollout batch has its rewards: metrics of the step, the same on every rank.

        batch: `batch.table` has the numbers of all samples, `batch.samples` those of this rank.
        """
        return {}

    def after_step(self, step: int, metrics: Mapping[str, float]) -> AfterStep:
        """After the updates of a step, and the evaluation if one is due. step: from 1."""
        return AfterStep()

    def end(self, state: LoopState) -> None:
        """After the last step and its checkpoint. Not called for a run that stops earlier."""

    def state(self) -> dict[str, object]:
        """What a resumed run needs, as JSON; saved with every checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, object]) -> None:
        """What `state` returned before the run was resumed; called before `start`."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run by name: the import path of the user's."""

    named: Mapping[str, Callback] = field(default_factory=dict)

    def start(self, run: Components, state: LoopState) -> None:
        """Give each its state, if the run is resumed, and start it."""
        for name, callback in self.named.items():
            if name in state.callbacks:
                callback.load_state(state.callbacks[name])
            callback.start(run, state.step)

    def after_rollout(self, step: int, batch: SampleBatch) -> dict[str, Mapping[str, float]]:
        """The metrics of each, by name. Raises `UserCodeError` where one returns something else."""
        metrics = {name: each.after_rollout(step, batch) for name, each in self.named.items()}
        _check_returned("after_rollout", metrics, Mapping, "a dict of metrics")
        return metrics

    def after_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, AfterStep]:
        """What each asks for, by name. Raises `UserCodeError` where one returns something else."""
        asked = {name: each.after_step(step, metrics) for name, each in self.named.items()}
        _check_returned("after_step", asked, AfterStep, "AfterStep()")
        return asked

    def end(self, state: LoopState) -> None:
        """End each."""
        for callback in self.named.values():
            callback.end(state)

    def state(self) -> dict[str, dict[str, object]]:
        """Of those that have one."""
        states = {name: callback.state() for name, callback in self.named.items()}
        return {name: state for name, state in states.items() if state}


def _check_returned(
    hook: str, returned: Mapping[str, object], expected: type, description: str
) -> None:
    """returned: by callback. description: of what it should be, for the message."""
    for name, value in returned.items():
        if not isinstance(value, expected):
            raise UserCodeError(
                f"{KEY} = {name!r}: {hook} returned a {type(value).__name__}; return {description}"
            )


def add_metrics(
    record: Mapping[str, float], by_callback: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """A step's metrics with those of its callbacks.

    Raises `UserCodeError` where a callback has a name that the record has already.
    """
    joined = dict(record)
    for callback, metrics in by_callback.items():
        taken = sorted(metrics.keys() & joined.keys())
        if taken:
            raise UserCodeError(
                f"{KEY} = {callback!r}: its metric {taken[0]!r} is one that the step has already;"
                " give it another name"
            )
        joined |= metrics
    return joined


def load_callbacks(config: Config, built_in: Mapping[str, Callback]) -> Callbacks:
    """The built-in callbacks, then those of the key ``callbacks``.

    Raises `UserCodeError` where one can't be loaded or made.
    """
    return Callbacks({**built_in, **{path: _load(path) for path in config.callbacks}})


def _load(path: str) -> Callback:
    make: Callable[[], object] = load_user_function(KEY, path)
    callback = call_for_trial(KEY, path, "no arguments", make)
    if not isinstance(callback, Callback):
        raise UserCodeError(
            f"{KEY} = {path!r}: made a {type(callback).__name__}; name a subclass of"
            " megatron_gspo.loop.callbacks.Callback, or a function that returns one"
        )
    return callback
