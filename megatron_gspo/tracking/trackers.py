"""Thin adapters to TensorBoard, Weights & Biases and MLflow. metrics.jsonl is written in any case."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_gspo.config.load import flat


class Tracker(Protocol):
    """A destination of metrics in addition to metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """A run, for trackers.

    Attributes:
        path: run directory; trackers keep their ids in it, so that a resumed run continues the same tracked run.
        config: the resolved config as plain data.
        resume_step: last step of the loaded checkpoint, None for a new run.
    """

    path: Path
    config: Mapping[str, Any]
    resume_step: int | None = None


class TensorBoard:
    """Events in run_dir/tensorboard. Steps after resume_step are purged."""

    def __init__(self, run: RunInfo) -> None:
        _require("tensorboard", "tensorboard")
        writer = _require("torch.utils.tensorboard", "tensorboard").SummaryWriter
        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = writer(str(run.path / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run. Log-in, mode and host are wandb's own settings (WANDB_MODE=offline works)."""

    def __init__(self, run: RunInfo, project: str) -> None:
        wandb = _require("wandb", "wandb")
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
        mlflow = _require("mlflow", "mlflow")
        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(experiment)
        identity = found.experiment_id if found else client.create_experiment(experiment)
        self._id = _stored_id(
            run, "mlflow_id", lambda: client.create_run(identity, run_name=run.path.name).info.run_id
        )
        self._client = client
        for name, value in flat(run.config).items() if run.resume_step is None else ():
            client.log_param(self._id, name, str(value)[:500])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackerSet:
    """Several trackers as one. A tracker that fails is reported once and removed; the run continues."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        numbers = {name: value for name, value in metrics.items() if value is not None}
        self._each(lambda tracker: tracker.log(step, numbers))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as error:  # an error of a remote service must not end the training
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                print(f"{name} failed and is not used any more: {error}", file=sys.stderr)


def make_trackers(
    run: RunInfo, *, tensorboard: bool = False, wandb: bool | str = False, mlflow: bool | str = False
) -> TrackerSet:
    """The enabled trackers.

    A string is the name of the project (W&B) or experiment (MLflow); True takes "megatron-gspo". Raises
    ImportError, one line, if a package is missing.
    """
    trackers: list[Tracker] = []
    if tensorboard:
        trackers.append(TensorBoard(run))
    if wandb:
        trackers.append(WandB(run, wandb if isinstance(wandb, str) else "megatron-gspo"))
    if mlflow:
        trackers.append(MLflow(run, mlflow if isinstance(mlflow, str) else "megatron-gspo"))
    return TrackerSet(trackers)


def _require(module: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(
            f"tracking.{key} is set: {package} is not installed; "
            "pip install 'megatron-gspo[tracking]' or set the key to false"
        ) from None


def _stored_id(run: RunInfo, file_name: str, make: Callable[[], str]) -> str:
    """The id stored in the run directory when the run is resumed, else a new one."""
    file = run.path / file_name
    if run.resume_step is not None and file.exists():
        return file.read_text().strip()
    identity = make()
    file.write_text(identity + "\n")
    return identity
