"""Output of a run: run directory, progress line, trackers, plots."""

from megatron_gspo.tracking.progress import Progress
from megatron_gspo.tracking.run_directory import RunDirectory, evenly_spaced, read_metrics
from megatron_gspo.tracking.run_environment import describe_environment
from megatron_gspo.tracking.trackers import RunInfo, Tracker, TrackerSet, make_trackers

__all__ = [
    "Progress",
    "RunDirectory",
    "RunInfo",
    "Tracker",
    "TrackerSet",
    "describe_environment",
    "evenly_spaced",
    "make_trackers",
    "read_metrics",
]
