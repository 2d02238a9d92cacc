"""What a run leaves behind and shows while it runs: run directory, progress line, trackers, picture."""

from megatron_gspo.tracking.progress import Progress
from megatron_gspo.tracking.run_directory import RunDirectory, read_metrics, spread
from megatron_gspo.tracking.run_environment import describe_environment
from megatron_gspo.tracking.trackers import RunInfo, Tracker, TrackerSet, make_trackers

__all__ = [
    "Progress",
    "RunDirectory",
    "RunInfo",
    "Tracker",
    "TrackerSet",
    "describe_environment",
    "make_trackers",
    "read_metrics",
    "spread",
]
