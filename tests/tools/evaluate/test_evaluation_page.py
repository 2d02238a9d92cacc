"""The page, the JSON and the lines of an evaluation."""

from __future__ import annotations

import json
from dataclasses import replace

from megatron_gspo.config import Config
from megatron_gspo.tools.compare.statistics import Interval
from megatron_gspo.tools.evaluate.elo import Rating
from megatron_gspo.tools.evaluate.evaluation_page import (
    page_context,
    pass_chart,
    print_scores,
    steps_chart,
    write_results,
)
from megatron_gspo.tools.evaluate.task_scores import TaskScores

CONFIG = Config.from_dict(
    {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"prompts": "p"},
        "seed": 77,
        "rollout": {"rollout_batch_size": 1},
        "training": {"steps": 1, "global_batch_size": 1},
    }
)
FIRST = TaskScores(
    task="codeforces",
    label="step_000002",
    step=2,
    verifier="code",
    prompts=3,
    samples=4,
    accuracy=Interval(0.25, 0.125, 0.5, 3),
    pass_at_k={1: Interval(0.25, 0.1, 0.5, 3), 4: Interval(0.5, 0.25, 0.75, 3)},
    rating=Rating(1234.4, 968.2, 1500.6, 2),
    response_length=99.5,
    truncated=0.125,
    failures=1,
    left_out={"needs <a> checker": 2},
)
SECOND = replace(
    FIRST,
    label="step_000004",
    step=4,
    difference=Interval(0.1, -0.05, 0.2, 3),
    rating=None,
    failures=0,
)


def test_the_page_has_every_number(tmp_path):
    files = write_results(
        [FIRST, SECOND], tmp_path, command="megatron-gspo evaluate run --steps 2,4", config=CONFIG
    )
    assert [file.name for file in files] == ["evaluation.html", "evaluation.json"]
    page = files[0].read_text()
    for text in (
        "25.0 [12.5, 50.0]",
        "10.0 [-5.0, 20.0]",
        "@1 25.0 [10.0, 50.0], @4 50.0 [25.0, 75.0]",
        "1234 [968, 1501] (2 problems)",
        "2 needs &lt;a&gt; checker",
        "evaluate run --steps 2,4",
        "<td>77</td>",
        "Verifier: code",
    ):
        assert text in page, text
    record = json.loads(files[1].read_text())
    assert record["scores"][1]["difference"] == {"mean": 0.1, "low": -0.05, "high": 0.2, "count": 3}
    assert record["scores"][0]["rating"]["low"] == 968.2 and record["config"]["seed"] == 77


def test_charts_over_steps_and_models():
    assert ">step<" in steps_chart([FIRST, SECOND])  # the label of the axis
    models = [
        replace(each, step=None, label=name) for each, name in ((FIRST, "Qwen"), (SECOND, "GLM"))
    ]
    assert ">Qwen<" in steps_chart(models) and ">step<" not in steps_chart(models)
    assert ">step_000004<" in pass_chart([FIRST, SECOND])
    one = replace(FIRST, pass_at_k={1: FIRST.accuracy}, accuracy=Interval(0.5, None, None, 1))
    assert pass_chart([one]) == ""
    section = page_context([one], "c", CONFIG)["tasks"][0]
    assert len(section["charts"]) == 1 and section["rows"][0][3] == "50.0"


def test_a_line_per_model(capsys):
    print_scores([FIRST, SECOND])
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first == "codeforces, step_000002: mean@4 25.0 [12.5, 50.0] %, pass@4 50.0 [25.0, 75.0], "
        "rating 1234 [968, 1501], 1 responses without a score"
    )
    assert second == "codeforces, step_000004: mean@4 25.0 [12.5, 50.0] %, pass@4 50.0 [25.0, 75.0]"
