"""Metric names of runs that older versions wrote, mapped to the present ones, so that old and new runs compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED_METRICS = {
    "routing/holes": "routing/missing_routes",
    "rollout/distrusted": "rollout/stale_responses",
    "time/probe": "time/log_prob_check",
}
# Every metric of a group.
RENAMED_GROUPS = {"rollout_correction": "rollout_is", "rollout_mask": "rollout_rs", "probe": "log_prob_check"}


def present_name(metric: str) -> str:
    """The present name of a metric; names that did not change are returned as they are."""
    group, slash, rest = metric.partition("/")
    return RENAMED_METRICS.get(metric) or RENAMED_GROUPS.get(group, group) + slash + rest


def with_present_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of metrics.jsonl under present names. A present name in the record takes precedence over an old one."""
    renamed = {present_name(metric): value for metric, value in record.items()}
    return renamed | {metric: value for metric, value in record.items() if present_name(metric) == metric}
