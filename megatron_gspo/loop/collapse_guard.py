"""An early warning of a collapse: the effective sample size of the importance ratios is low for several steps in a row.

`megatron_gspo.tools.compare.early_warning` chose it among other metrics on recorded runs; see docs/collapse.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_gspo.config.training_sections import GuardConfig
from megatron_gspo.errors import RunError

_METRIC = "effective_sample_size"


class CollapseError(RunError):
    """The guard ended the run, after a checkpoint."""


def count_low_steps(guard: GuardConfig, metrics: Mapping[str, float], before: int) -> int:
    """Steps in a row with a low effective sample size, of which ``before`` came before this one. A step without the
    metric (no update, no ratio) leaves the number as it is."""
    value = metrics.get(_METRIC)
    if value is None:
        return before
    return before + 1 if value < guard.effective_sample_size else 0


def guard_metrics(guard: GuardConfig, metrics: Mapping[str, float], low_steps: int) -> dict[str, float]:
    """``guard/alarm`` of a step with these metrics and so many low steps in a row: 1 or 0. {} without a guard or
    without the metric."""
    if guard.action == "off" or _METRIC not in metrics:
        return {}
    return {"guard/alarm": float(low_steps >= guard.steps)}


def alarm_text(guard: GuardConfig, step: int, value: float) -> str:
    """The line of an alarm: since when the metric is low, and what to try. value: of the metric."""
    steps = f"the last {guard.steps} steps" if guard.steps > 1 else "this step"
    return (
        f"step {step}: {_METRIC} = {value:.2g} is below {guard.effective_sample_size:g} for {steps}, which announces "
        "a collapse; try routing.replay: r3, algorithm.name: gspo or a smaller optimizer.lr"
    )
