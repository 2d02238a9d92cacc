"""The progress line out of a terminal."""

import io

from megatron_gspo.tracking import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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
        progress.update(8, {"eval/accuracy": -2.4766})  # of a reward model's logits
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 5/10  reward 0.512  clip 15.3%  3,412 tok/s  left 1:40"
    assert lines[1] == "step 6/10  accuracy 50.0%  left 1:00"
    assert lines[2] == "step 7/10  left 0:30"  # an accuracy is shown when it is new
    assert lines[3].startswith("step 8/10  held-out reward -2.477  left")
