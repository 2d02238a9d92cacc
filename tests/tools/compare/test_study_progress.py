"""The progress of a comparison: plain lines in a file, bars in a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.study_plan import RunSpec
from megatron_gspo.tools.compare.study_progress import Display
from tests.tools.compare.synthetic import VARIANTS, Course, write_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made_run(
    folder: Path, variant: str = "gspo", seed: int = 1, course: Course | None = None
) -> RunSpec:
    spec = RunSpec(variant, seed, folder / f"{variant}_{seed}", {})
    write_run(spec.run_dir, seed, course or VARIANTS["gspo"], steps=10)
    return spec


def test_a_finished_run_is_one_line_with_its_accuracy_and_time(tmp_path):
    stream = io.StringIO()
    with Display(2, 1, stream=stream) as display:
        spec = made_run(tmp_path)
        display.started(spec)
        display.running([spec])
        assert stream.getvalue() == ""
        display.ended(spec, 65.0)
    [line] = stream.getvalue().splitlines()
    assert line.startswith("1/2  left 1:05  gspo seed 1: finished, accuracy ")
    assert line.endswith(" %, 1:05")


def test_the_time_left_is_divided_by_the_runs_at_once(tmp_path):
    stream = io.StringIO()
    with Display(5, 2, stream=stream) as display:
        display.ended(made_run(tmp_path), 60.0)  # 4 left, 2 at once
        display.ended(made_run(tmp_path, seed=2), 120.0)  # 3 left of 90 s on average
    first, second = stream.getvalue().splitlines()
    assert first.startswith("1/5  left 2:00 ") and second.startswith("2/5  left 2:15 ")


def test_a_run_that_was_finished_before_counts_without_a_line_or_a_time(tmp_path):
    stream = io.StringIO()
    with Display(3, 1, stream=stream) as display:
        display.ended(made_run(tmp_path), None)
        assert stream.getvalue() == ""
        display.ended(made_run(tmp_path, seed=2), 30.0)
    assert stream.getvalue().startswith("2/3  left 0:30 ")


def test_a_failed_run_shows_its_error(tmp_path):
    stream = io.StringIO()
    with Display(1, 1, stream=stream) as display:
        display.ended(made_run(tmp_path, course=Course(fails=7)), 5.0)
    assert stream.getvalue().startswith(
        "1/1  gspo seed 1: failed, step 8: the gradient is not finite, "
    )


def test_a_collapsed_run_is_named(tmp_path):
    stream = io.StringIO()
    with Display(1, 1, stream=stream) as display:
        display.ended(made_run(tmp_path, course=Course(speed=2.0, collapses=5)), 5.0)
    assert ": finished, collapsed, accuracy " in stream.getvalue()


@pytest.mark.parametrize(("seconds", "shown"), [(0.5, False), (1.5, True)])
def test_a_terminal_shows_each_running_run_once_a_second(seconds, shown, tmp_path):
    stream, clock = Terminal(), Clock()
    spec = made_run(tmp_path)
    with Display(1, 1, stream=stream, clock=clock) as display:
        display.started(spec)
        clock.now = seconds
        display.running([spec])
    assert ("step 10/10" in stream.getvalue()) is shown


def test_a_terminal_keeps_the_line_of_a_run_that_ended(tmp_path):
    stream = Terminal()
    spec = made_run(tmp_path)
    with Display(1, 1, stream=stream) as display:
        display.started(spec)
        display.ended(spec, 3.0)
    assert (
        "gspo seed 1: finished, accuracy" in stream.getvalue() and "all runs" in stream.getvalue()
    )
