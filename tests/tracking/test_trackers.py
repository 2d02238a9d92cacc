"""The adapters write to the real packages, offline; a missing or failing one is reported in one line."""

import sys
from pathlib import Path

import pytest

from megatron_gspo.tracking import RunInfo, TrackerSet, make_trackers
from tests.support.waiting import wait_for


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_counts_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trackers = make_trackers(RunInfo(tmp_path, {}), tensorboard=True)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": 0.5, "entropy": None})
    trackers.close()
    trackers = make_trackers(RunInfo(tmp_path, {}, resume_step=1), tensorboard=True)
    trackers.log(2, {"reward/mean": 0.75})
    trackers.close()
    assert read_events(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.5), (2, 0.75)]}


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for resume, step in ((None, 1), (1, 2)):
        trackers = make_trackers(RunInfo(tmp_path, {"optimizer": {"lr": 0.5}}, resume), mlflow="experiment")
        trackers.log(step, {"reward/mean": float(step)})
        trackers.close()
    client = mlflow.MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert len(found) == 1
    history = client.get_metric_history(found[0].info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 1.0), (2, 2.0)]
    assert found[0].data.params == {"optimizer.lr": "0.5"}


def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = make_trackers(RunInfo(tmp_path, {"seed": 1}), wandb="project")
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close()
    identity = (tmp_path / "wandb_id").read_text().strip()
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}/*.wandb"))
    assert len(files) == 1
    wait_for(lambda: b"reward/mean" in files[0].read_bytes())  # its own process writes the file, when it gets a turn


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python puts there to make an import fail
    with pytest.raises(ImportError) as caught:
        make_trackers(RunInfo(tmp_path, {}), **{name: True})
    assert str(caught.value) == (
        f"tracking.{name} is set: {name} is not installed; "
        "pip install 'megatron-gspo[tracking]' or set the key to false"
    )


def test_a_failing_tracker_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Recorder:
        def __init__(self, broken: bool) -> None:
            self.broken, self.steps = broken, []

        def log(self, step: int, metrics: dict) -> None:
            self.steps.append(step)
            if self.broken:
                raise ConnectionError("no route")

        def close(self) -> None:
            self.steps.append(-1)

    broken, sound = Recorder(True), Recorder(False)
    trackers = TrackerSet([broken, sound])
    trackers.log(1, {})
    trackers.log(2, {})
    trackers.close()
    assert broken.steps == [1] and sound.steps == [1, 2, -1]
    assert capsys.readouterr().err == "Recorder failed and is not used any more: no route\n"
