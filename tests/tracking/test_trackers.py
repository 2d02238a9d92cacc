"""The adapters write to the real packages, offline; a missing or failing one is reported in one
line.
"""

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from megatron_gspo.errors import MissingPackageError
from megatron_gspo.tracking import RunInfo, TrackerSet, make_trackers
from tests.support.waiting import wait_for

PATIENCE = 300.0  # seconds: packages take long to import on a busy machine


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_counts_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trackers = make_trackers(RunInfo(tmp_path, {}), tensorboard=True)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": 0.5, "entropy": None})
    trackers.close(PATIENCE)
    trackers = make_trackers(RunInfo(tmp_path, {}, resume_step=1), tensorboard=True)
    trackers.log(2, {"reward/mean": 0.75})
    trackers.close(PATIENCE)
    assert read_events(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.5), (2, 0.75)]}


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for resume, step in ((None, 1), (1, 2)):
        trackers = make_trackers(
            RunInfo(tmp_path, {"optimizer": {"lr": 0.5}}, resume), mlflow="experiment"
        )
        trackers.log(step, {"reward/mean": float(step)})
        trackers.close(PATIENCE)
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert len(runs) == 1
    history = client.get_metric_history(runs[0].info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 1.0), (2, 2.0)]
    assert runs[0].data.params == {"optimizer.lr": "0.5"}


def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = make_trackers(RunInfo(tmp_path, {"seed": 1}), wandb="project")
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close(PATIENCE)
    identity = (tmp_path / "wandb_id").read_text().strip()
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}/*.wandb"))
    assert len(files) == 1
    # Its own process writes the file, when it gets a turn.
    wait_for(lambda: b"reward/mean" in files[0].read_bytes())


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python puts there to make an import fail
    with pytest.raises(MissingPackageError) as caught:
        make_trackers(RunInfo(tmp_path, {}), **{name: True})
    assert (
        str(caught.value) == f"tracking.{name} is set: {name} is not installed; "
        "pip install 'megatron-gspo[tracking]' or set the key to false"
    )


@pytest.mark.parametrize("name", ["trackio", "swanlab"])
def test_a_missing_package_of_its_own_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=f"pip install {name} or set the key to false"):
        make_trackers(RunInfo(tmp_path, {}), **{name: True})


FAKES = Path(__file__).parents[1] / "support" / "tracker_packages"


@pytest.fixture
def fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with the signatures of trackio's and SwanLab's, which write what they are given to
    the file that is returned."""
    calls = tmp_path / "calls.jsonl"
    monkeypatch.setenv("FAKE_TRACKER_CALLS", str(calls))
    monkeypatch.syspath_prepend(str(FAKES))
    for name in ("trackio", "swanlab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return calls


IN_FAKES = pytest.mark.parametrize(
    ("package", "name"), [("trackio", "trackio"), ("swanlab", "SwanLab")]
)


@IN_FAKES
def test_a_resumed_run_goes_on_under_its_identity(
    tmp_path: Path, fake_packages: Path, package: str, name: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for resume, step in ((None, 1), (1, 2)):
        info = RunInfo(run, {"optimizer": {"lr": 0.5}}, resume)
        trackers = make_trackers(info, **{package: "project"})
        trackers.log(step, {"reward/mean": 0.5, "entropy": None})
        trackers.close(300.0)
    calls = [json.loads(line) for line in fake_packages.read_text().splitlines()]
    first, logged, ended, again, *_ = calls
    assert [call["call"] for call in calls] == ["init", "log", "finish"] * 2
    assert first["project"] == "project" and first["resume"] == "allow"
    assert first["identity"] == again["identity"] == (run / f"{package}_id").read_text().strip()
    assert first["config"] in ({"optimizer.lr": 0.5}, {"optimizer": {"lr": 0.5}})
    assert logged == {"call": "log", "metrics": {"reward/mean": 0.5}, "step": 1}
    assert ended == {"call": "finish"}


@IN_FAKES
@pytest.mark.parametrize("fault", ["no network", "wrong key", "asks", "ends"])
def test_a_service_out_of_reach_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    fake_packages: Path,
    package: str,
    name: str,
    fault: str,
) -> None:
    """It refuses the connection or the key, asks for a key that nobody types, or its process ends
    in the middle."""
    monkeypatch.setenv("FAKE_TRACKER_FAULT", fault)
    log_two_steps({package: True}, tmp_path)
    [line] = lines
    assert line.startswith(f"{name} failed and is not used any more: ") and "\n" not in line


@IN_FAKES
def test_a_service_that_hangs_in_the_middle_delays_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    fake_packages: Path,
    package: str,
    name: str,
) -> None:
    monkeypatch.setenv("FAKE_TRACKER_FAULT", "hangs")
    log_two_steps({package: True}, tmp_path, seconds=1.0)
    late = "it did not take the last metrics in time; metrics.jsonl has them"
    assert lines == [f"{name} failed and is not used any more: {late}"]


class Lines(logging.Handler):
    """The messages that the trackers log, whichever thread does."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    trackers_logger = logging.getLogger("megatron_gspo.tracking.trackers")
    trackers_logger.addHandler(handler)
    yield handler.messages
    trackers_logger.removeHandler(handler)


def log_two_steps(tracker: dict, run: Path, *, seconds: float = 60.0) -> float:
    """Log two steps to a run's trackers and close them; the seconds that the steps took."""
    trackers = make_trackers(RunInfo(run, {"seed": 1}), **tracker)
    began = time.monotonic()
    trackers.log(1, {"reward/mean": 0.5})
    trackers.log(2, {"reward/mean": 0.5})
    took = time.monotonic() - began
    trackers.close(seconds)
    return took


def test_a_server_that_never_answers_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        took = log_two_steps({"mlflow": True}, tmp_path, seconds=1.0)
    late = "it did not take the last metrics in time; metrics.jsonl has them"
    assert lines == [f"MLflow failed and is not used any more: {late}"] and took < 1.0
    assert not [
        child
        for child in psutil.Process().children()
        if "tracker_process" in " ".join(child.cmdline())
    ]


def test_a_wrong_key_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wrong")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    log_two_steps({"wandb": True}, tmp_path)
    [line] = lines
    assert line.startswith("W&B failed and is not used any more: ")
    assert "API key" in line
    assert "\n" not in line


def test_a_server_that_refuses_connections_is_one_line_and_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    log_two_steps({"mlflow": True, "tensorboard": True}, tmp_path)
    [line] = lines
    assert re.match(r"MLflow failed and is not used any more: .*127\.0\.0\.1", line)
    assert "\n" not in line
    assert read_events(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.5), (2, 0.5)]}


def test_a_process_that_dies_is_one_line(tmp_path: Path, lines: list[str]) -> None:
    trackers = make_trackers(RunInfo(tmp_path, {}), tensorboard=True)
    this_process = psutil.Process()
    [child] = wait_for(
        lambda: [c for c in this_process.children() if "tracker_process" in " ".join(c.cmdline())]
    )
    child.kill()
    trackers.log(1, {})
    trackers.close(PATIENCE)
    assert lines == [
        "TensorBoard failed and is not used any more: its process ended with exit code -9"
    ]


@pytest.mark.parametrize("request_line", [b'{"kind": "none"}\n', b'{"kind": "no'])
def test_a_process_without_its_trainer_ends_in_silence(request_line: bytes) -> None:
    """The trainer was killed before it read a reply, or in the middle of a request."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_gspo.tracking.tracker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(request_line)
    assert (process.returncode, errors) == (1, b"")


class Slow:
    """Takes a step when it is told to."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.may_go.wait(60.0)
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


def test_a_slow_tracker_gets_every_step_and_one_far_behind_is_left_out(lines: list[str]) -> None:
    slow = Slow()
    trackers = TrackerSet([slow])
    for step in range(100):
        trackers.log(step, {})
    assert slow.steps == []
    slow.may_go.set()
    trackers.close()
    assert slow.steps == [*range(100), -1] and lines == []
    slow = Slow()
    trackers = TrackerSet([slow])
    for step in range(1100):
        trackers.log(step, {})
    assert lines == ["Slow failed and is not used any more: it is 1000 steps behind"]
    slow.may_go.set()
    trackers.close()
