"""Thin adapters to TensorBoard, Weights & Biases, MLflow, trackio and SwanLab: one class and one row
of `TRACKERS` each.

metrics.jsonl is written in any case.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from megatron_gspo.config import TrackingConfig
from megatron_gspo.config.load import flat
from megatron_gspo.errors import MissingPackageError, first_line
from megatron_gspo.launch_environment import own_import_path, without_launch_variables
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_MOST_WAITING = 1000  # steps that wait for a tracker, before it is left out
_LATE_SECONDS = 60.0  # behind the run, after which a line says so
_KILL_SECONDS = 5.0  # that a killed tracker's thread may take to end
_MOST_METRICS = 1000  # of one request to MLflow
_MOST_PARAMS = 100

T = TypeVar("T")


class Tracker(Protocol):
    """A destination of metrics in addition to metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """A run, for trackers."""

    path: Path
    """Run directory; trackers keep their ids in it, so that a resumed run continues the same
    tracked run."""

    config: Mapping[str, Any]
    """The resolved config as plain data."""

    resume_step: int | None = None
    """Last step of the loaded checkpoint, None for a new run."""


class RemoteTracker:
    """A tracker in a process of its own (`tracker_process.py`), which can be killed where its
    package hangs.
    """

    def __init__(self, kind: str, run: RunInfo, project: str) -> None:
        """kind: a key of `TRACKERS`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = {
            "kind": kind,
            "path": str(run.path),
            "config": run.config,
            "resume_step": run.resume_step,
            "project": project,
            "command": sys.argv,
        }

    def start(self) -> None:
        """Start the process, and the tracker in it.

        Raises RuntimeError where it fails, as the other methods do.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_gspo.tracking.tracker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**without_launch_variables(os.environ), **own_import_path()},
            start_new_session=True,  # killed with its children; not interrupted by Ctrl-C
        )
        self._ask(self._settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._ask({"step": step, "metrics": metrics})

    def close(self) -> None:
        self._ask({"close": True})
        assert self._process is not None
        self._process.wait()

    def kill(self) -> None:
        """End the process and its children, W&B's service among them, wherever they are."""
        if self._process is None:
            return
        tree = []
        with contextlib.suppress(psutil.Error):
            tree = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        line = b""
        with contextlib.suppress(OSError):  # its process has ended
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with exit code {process.wait()}")
        error = json.loads(line)["error"]
        if error is not None:
            raise RuntimeError(error)


class TensorBoard:
    """Events in run_dir/tensorboard. Steps after resume_step are purged."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run. Log-in, mode and host are wandb's own settings (WANDB_MODE=offline works)."""

    def __init__(self, run: RunInfo, project: str) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=run.path.name,
            dir=str(run.path),
            config=dict(run.config),
            id=_stored_id(run, "wandb_id", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """One MLflow run, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: RunInfo, experiment: str) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        client = mlflow.MlflowClient()
        known = client.get_experiment_by_name(experiment)
        identity = known.experiment_id if known else client.create_experiment(experiment)
        self._id = _stored_id(
            run,
            "mlflow_id",
            lambda: client.create_run(identity, run_name=run.path.name).info.run_id,
        )
        self._client = client
        self._metric = Metric
        if run.resume_step is None:
            params = [Param(name, str(value)[:500]) for name, value in flat(run.config).items()]
            for chunk in _chunks(params, _MOST_PARAMS):
                client.log_batch(self._id, params=chunk)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        milliseconds = int(time.time() * 1000)
        values = [self._metric(name, value, milliseconds, step) for name, value in metrics.items()]
        for chunk in _chunks(values, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=chunk)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """One trackio run, in its local database or where trackio's own variables say."""

    def __init__(self, run: RunInfo, project: str) -> None:
        import trackio

        # A run's name is its identity.
        name = _stored_id(run, "trackio_id", lambda: f"{run.path.name}-{uuid.uuid4().hex[:8]}")
        self._run = trackio.init(project, name=name, config=flat(run.config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """One SwanLab experiment. Log-in, mode and host are swanlab's own settings (SWANLAB_MODE=offline
    works)."""

    def __init__(self, run: RunInfo, project: str) -> None:
        import swanlab

        self._run = swanlab.init(
            project=project,
            name=run.path.name,
            config=dict(run.config),
            log_dir=str(run.path / "swanlab"),
            id=_stored_id(run, "swanlab_id", lambda: uuid.uuid4().hex[:21]),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class TrackerKind:
    """A tracker that a run can have."""

    name: str
    """As the user knows it."""

    make: Callable[[RunInfo, str], Tracker]
    """Start it for a run in a project."""

    installs: str = "'megatron-gspo[tracking]'"
    """What pip installs it with."""


TRACKERS = {
    "tensorboard": TrackerKind("TensorBoard", lambda run, project: TensorBoard(run)),
    "wandb": TrackerKind("W&B", WandB),
    "mlflow": TrackerKind("MLflow", MLflow),
    "trackio": TrackerKind("trackio", Trackio, "trackio"),
    "swanlab": TrackerKind("SwanLab", SwanLab, "swanlab"),
}
"""By their package, which is their key in ``tracking``."""


class TrackerSet:
    """Several trackers as one. A thread of each hands it the metrics, so that a slow or unreachable
    service delays no step; a tracker that fails is reported in one line and left out."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._feeds = [_Feed(type(tracker).__name__, tracker) for tracker in trackers]

    def add(self, name: str, tracker: Tracker) -> None:
        """Add a tracker under the name that the user knows."""
        self._feeds.append(_Feed(name, tracker))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Hand the metrics over. Returns at once."""
        numbers = {name: value for name, value in metrics.items() if value is not None}
        for feed in self._feeds:
            feed.put(step, numbers)

    def close(self, seconds: float = 30.0) -> None:
        """Let the trackers take what is left and end them; those that need longer than so many
        seconds are left out.
        """
        deadline = time.monotonic() + seconds
        for feed in self._feeds:
            feed.begin_close()
        for feed in self._feeds:
            feed.finish_close(deadline)
        self._feeds = []


class _Feed:
    """One tracker, its thread, and the steps that wait for it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._is_over = False
        self._is_late = False
        self._up_to_date = time.monotonic()  # when it last had taken every step
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: dict[str, float]) -> None:
        if self._is_over:
            return
        if self._waiting.empty():
            self._up_to_date = time.monotonic()
        elif time.monotonic() - self._up_to_date > _LATE_SECONDS and not self._is_late:
            self._is_late = True
            behind = f"{self._waiting.qsize()} steps behind"
            logger.warning(
                f"{self._name} is {behind}; the run does not wait for it, and metrics.jsonl has"
                " every step"
            )
        try:
            self._waiting.put_nowait((step, numbers))
        except queue.Full:
            self._give_up(f"it is {_MOST_WAITING} steps behind")

    def begin_close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def finish_close(self, deadline: float) -> None:
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._give_up("it did not take the last metrics in time; metrics.jsonl has them")
            self._thread.join(_KILL_SECONDS)

    def _run(self) -> None:
        try:
            if isinstance(self._tracker, RemoteTracker):
                self._tracker.start()
            while not self._is_over and (waiting := self._waiting.get()) is not None:
                step, numbers = waiting
                self._tracker.log(step, numbers)
            if not self._is_over:
                self._tracker.close()
        except (Exception, SystemExit) as error:
            # An error of a remote service must not end the training.
            self._give_up(first_line(error))

    def _give_up(self, reason: str) -> None:
        """Leave the tracker out; its thread ends, since its process does."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        logger.warning(f"{self._name} failed and is not used any more: {reason}")
        if isinstance(self._tracker, RemoteTracker):
            self._tracker.kill()


def enabled_trackers(tracking: TrackingConfig) -> dict[str, bool | str]:
    """What the config has for each of `TRACKERS`, by name."""
    return {package: getattr(tracking, package) for package in TRACKERS}


def make_trackers(run: RunInfo, **enabled: bool | str) -> TrackerSet:
    """The trackers that are enabled, by their names in `TRACKERS`.

    A string is the name of the project, or experiment of MLflow; True takes "megatron-gspo". Raises
    what `require_packages` raises.
    """
    require_packages(**enabled)
    trackers = TrackerSet()
    for package, given in enabled.items():
        if given:
            project = given if isinstance(given, str) else "megatron-gspo"
            trackers.add(TRACKERS[package].name, RemoteTracker(package, run, project))
    return trackers


def require_packages(**enabled: bool | str) -> None:
    """Raises MissingPackageError if the package of an enabled tracker is not installed."""
    for package, given in enabled.items():
        if given and importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"tracking.{package} is set: {package} is not installed; pip install"
                f" {TRACKERS[package].installs} or set the key to false"
            )


def _stored_id(run: RunInfo, file_name: str, make: Callable[[], str]) -> str:
    """The id stored in the run directory when the run is resumed, else a new one."""
    file = run.path / file_name
    if run.resume_step is not None and file.exists():
        return file.read_text().strip()
    identity = make()
    file.write_text(identity + "\n")
    return identity


def _chunks(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """The items, at most `count` at a time."""
    return (items[start : start + count] for start in range(0, len(items), count))
