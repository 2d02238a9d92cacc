"""An early warning of a collapse: for several steps in a row the ratios' effective sample size is
low, or the log-probs of rollout engine and trainer are far apart.

They were chosen among other metrics on recorded runs; see docs/collapse.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.config.training_sections import GuardConfig
from megatron_gspo.loop.callbacks import AfterStep, Callback

SAMPLE_SIZE = "effective_sample_size"
MISMATCH = "mismatch/k3"


class CollapseGuard(Callback):
    """Counts the steps in a row with a metric beyond its threshold, and raises the alarm.

    guard: with its thresholds resolved (`GuardConfig.for_algorithm`).
    """

    def __init__(self, guard: GuardConfig) -> None:
        self._guard = guard
        self._low_steps = 0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> AfterStep:
        """The alarm of the step, and whether it stops the run."""
        self._low_steps = count_low_steps(self._guard, metrics, self._low_steps)
        alarm = guard_metrics(self._guard, metrics, self._low_steps)
        if alarm.get("guard/alarm") != 1.0:
            return AfterStep(alarm)
        text = alarm_text(self._guard, step, metrics)
        return AfterStep(
            alarm,
            warning=text,
            stop=text if self._guard.action == "stop" else "",
            resume_hint=", with guard.action: warn to go on without a change",
        )

    def state(self) -> dict[str, Any]:
        """The steps in a row so far."""
        return {"low_steps": self._low_steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._low_steps = state["low_steps"]


def collapse_guard(config: Config) -> dict[str, CollapseGuard]:
    """The guard by its name, if it is on."""
    if config.guard.action == "off":
        return {}
    return {"guard": CollapseGuard(config.guard.for_algorithm(config.algorithm))}


def count_low_steps(guard: GuardConfig, metrics: Mapping[str, float], before: int) -> int:
    """Steps in a row with a metric beyond its threshold, of which ``before`` came before this one.
    A step without the metrics (no update, no ratio) leaves the number as it is."""
    if not _measured(metrics):
        return before
    return before + 1 if _beyond(guard, metrics) else 0


def guard_metrics(
    guard: GuardConfig, metrics: Mapping[str, float], low_steps: int
) -> dict[str, float]:
    """``guard/alarm`` of a step with these metrics and so many steps in a row: 1 or 0. {} without a
    guard or without the metrics."""
    if guard.action == "off" or not _measured(metrics):
        return {}
    return {"guard/alarm": float(low_steps >= guard.steps)}


def alarm_text(guard: GuardConfig, step: int, metrics: Mapping[str, float | None]) -> str:
    """The line of an alarm: what is beyond its threshold, since when, and what to try. metrics:
    of the step.
    """
    steps = f"the last {guard.steps} steps" if guard.steps > 1 else "this step"
    beyond = _beyond(guard, metrics)
    fixes = "routing.replay: r3, algorithm.name: gspo or a smaller optimizer.lr"
    if SAMPLE_SIZE not in beyond:
        fixes = "routing.replay: r3 or engines with the trainer's dtype"
    return (
        f"step {step}: {' and '.join(beyond.values())} for {steps}, which announces a collapse; try"
        f" {fixes}"
    )


def _measured(metrics: Mapping[str, float]) -> bool:
    return SAMPLE_SIZE in metrics or MISMATCH in metrics


def _beyond(guard: GuardConfig, metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The metrics beyond their thresholds, each in words."""
    beyond = {}
    low = metrics.get(SAMPLE_SIZE)
    high = metrics.get(MISMATCH)
    least = guard.effective_sample_size
    if low is not None and least is not None and low < least:
        beyond[SAMPLE_SIZE] = f"{SAMPLE_SIZE} = {low:.2g} is below {least:g}"
    if high is not None and high > guard.mismatch_k3:
        beyond[MISMATCH] = f"{MISMATCH} = {high:.2g} is above {guard.mismatch_k3:g}"
    return beyond
