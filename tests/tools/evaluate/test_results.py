"""The lines of an evaluation and its JSON."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.tools.compare.statistics import Interval
from megatron_gspo.tools.evaluate.elo import Rating
from megatron_gspo.tools.evaluate.results import print_scores
from megatron_gspo.tools.evaluate.task_scores import TaskScores

FIRST = TaskScores(
    task="codeforces",
    label="step_000002",
    step=2,
    verifier="code",
    prompts=3,
    samples=4,
    accuracy=Interval(0.25, 0.125, 0.5, 3),
    pass_at_k={1: Interval(0.25, 0.1, 0.5, 3), 4: Interval(0.5, 0.25, 0.75, 3)},
    rating=Rating(1912.4, 1803.0, 2021.0, 2),
    response_length=99.5,
    truncated=0.125,
    failures=1,
    left_out={"needs a checker": 2},
)
SECOND = replace(
    FIRST,
    label="step_000004",
    rating=None,
    step=4,
    difference=Interval(0.1, -0.05, 0.2, 3),
    failures=0,
    left_out={},
)


def test_a_line_per_model(capsys):
    print_scores([FIRST, SECOND])
    assert capsys.readouterr().out.splitlines() == [
        "codeforces, step_000002: mean@4 25.0 [12.5, 50.0] %, pass@4 50.0 [25.0, 75.0], "
        "rating 1912 [1803, 2021] of 2 problems, 2 rows left out: needs a checker, 1 responses without a score",
        "codeforces, step_000004: mean@4 25.0 [12.5, 50.0] %, pass@4 50.0 [25.0, 75.0]",
    ]
