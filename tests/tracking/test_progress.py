"""The progress line, in a terminal and out of one."""

import io

import pytest

from megatron_gspo.terminal import get_logger
from megatron_gspo.tracking import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {"reward/mean": 0.51234, "clip_fraction/tokens": 0.153, "perf/tokens_per_second": 3412.4}


def test_plain_lines_and_time_left() -> None:
    stream = io.StringIO()
    clock = Clock()
    with Progress(10, start=4, stream=stream, clock=clock) as progress:
        clock.now += 20
        # 20 s a step, 5 steps left; the steps before the resume don't count.
        progress.update(5, METRICS)
        clock.now += 10
        progress.update(6, {"eval/accuracy": 0.5})  # 30 s for two steps, 4 left
        progress.update(7, {})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 5/10  reward 0.512  clip 15.3%  3,412 tok/s  left 1:40"
    assert lines[1] == "step 6/10  accuracy 50.0%  left 1:00"
    assert lines[2] == "step 7/10  left 0:30"  # an accuracy is shown when it is new


def test_speed_and_idle_time_are_shown() -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream, clock=Clock()) as progress:
        progress.update(
            1,
            {
                "perf/generated_tokens_per_second": 1234.5,
                "perf/mfu": 0.312,
                "perf/trainer_idle": 0.1,
                "perf/servers_idle": 0.456,
            },
        )
    shown = "generates 1,234 tok/s  mfu 31.2%  trainer idle 10%  servers idle 46%"
    assert shown in stream.getvalue()


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(10) as progress:
        progress.update(8, {"eval/accuracy": 0.5})
        progress.update(10, METRICS)
        get_logger("megatron_gspo.tests").info("a line above the bar, [not markup]")
    shown = stream.getvalue()
    assert "accuracy 50.0% (step 8)" in shown  # the last one, of a terminal of 80 columns
    assert "step 10/10" in shown and "reward 0.512" in shown
    assert "a line above the bar, [not markup]\n" in shown
