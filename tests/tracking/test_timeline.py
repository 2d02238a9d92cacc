"""The picture of the time line."""

import json
from pathlib import Path

import pytest

from megatron_gspo.tracking.timeline import draw_timeline

pytest.importorskip("matplotlib")


def write(folder: Path, steps: int) -> Path:
    spans = [["generate", 0.0, 2.0], ["train", 2.5, 4.0], ["weight_sync", 4.0, 4.2]]
    lines = [json.dumps({"step": step, "spans": spans}) for step in range(1, steps + 1)]
    (folder / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_some_steps_are_drawn_with_what_they_did(tmp_path: Path) -> None:
    picture = draw_timeline(write(tmp_path, 100))
    assert picture == tmp_path / "timeline.svg"
    text = picture.read_text()
    assert ">step 1<" in text and ">step 100<" in text and text.count(">step ") == 12
    assert "updates" in text and "weight sync" in text and "checkpoint" not in text


def test_equal_runs_have_equal_pictures(tmp_path: Path) -> None:
    run = write(tmp_path, 3)
    first = draw_timeline(run, tmp_path / "first.svg").read_bytes()
    assert draw_timeline(run, tmp_path / "second.svg").read_bytes() == first


def test_a_run_without_a_step_has_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no time line to draw; train at least one step"):
        draw_timeline(tmp_path)
