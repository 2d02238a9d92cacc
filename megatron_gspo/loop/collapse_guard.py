"""An early warning of a collapse: for several steps in a row the ratios' effective sample size is
low, or the log-probs of rollout engine and trainer are far apart.

They were chosen among other metrics on recorded runs; see docs/collapse.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_gspo.config.training_sections import GuardConfig
from megatron_gspo.errors import RunError

SAMPLE_SIZE, MISMATCH = "effective_sample_size", "mismatch/k3"


class CollapseError(RunError):
    """The guard ended the run, after a checkpoint."""


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
    found = {}
    low, high = metrics.get(SAMPLE_SIZE), metrics.get(MISMATCH)
    least = guard.effective_sample_size
    if low is not None and least is not None and low < least:
        found[SAMPLE_SIZE] = f"{SAMPLE_SIZE} = {low:.2g} is below {least:g}"
    if high is not None and high > guard.mismatch_k3:
        found[MISMATCH] = f"{MISMATCH} = {high:.2g} is above {guard.mismatch_k3:g}"
    return found
