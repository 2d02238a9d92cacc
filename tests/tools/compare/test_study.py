"""From run directories to figures, differences and verdicts."""

from dataclasses import replace

import pytest

from megatron_gspo.tools.compare.finished_runs import study_of
from megatron_gspo.tools.compare.statistics import Difference
from megatron_gspo.tools.compare.study import (
    NOT_SEEN,
    PRIMARY,
    SEEN,
    UNTESTED,
    differences,
    expectations,
    mean_value,
    read_study,
    run_counts,
    values,
    verdict_of,
)
from megatron_gspo.tools.compare.study_plan import Expectation, load_comparison
from tests.tools.compare.synthetic import VARIANTS, Course, compared, write_comparison, write_run


def test_every_run_is_counted(tmp_path):
    paths = [
        write_run(tmp_path / "1", 1, Course(), steps=10),
        write_run(tmp_path / "2", 2, Course(collapses=4), steps=10),
        write_run(tmp_path / "3", 3, Course(fails=7), steps=10),
    ]
    half = write_run(tmp_path / "4", 4, Course(), steps=10)
    (half / "summary.json").unlink()
    study = study_of([*paths, half], "")
    assert run_counts(study.runs) == "2 finished, 1 failed, 1 incomplete, 1 collapsed"
    # the failed one counts with what it had, the open one not
    assert mean_value(study, "grpo", "final_accuracy").count == 3


def test_differences_are_paired_and_corrected(tmp_path):
    study = compared(
        tmp_path, {"grpo": Course(), "gspo": VARIANTS["gspo"], "r2": VARIANTS["grpo_r2"]}
    )
    found = differences(study, "final_accuracy")
    assert set(found) == {"gspo", "grpo_r2"}
    base, other = (values(study, name, "final_accuracy") for name in ("grpo", "gspo"))
    assert found["gspo"].mean == pytest.approx(sum(other[seed] - base[seed] for seed in base) / 3)
    raw = sorted(item.p_t for item in found.values())
    corrected = sorted(item.p_holm for item in found.values())
    assert corrected[0] == pytest.approx(min(1.0, 2 * raw[0]))
    assert corrected[1] == pytest.approx(min(1.0, max(2 * raw[0], raw[1])))


@pytest.mark.parametrize(
    ("mean", "p_holm", "verdict"),
    [
        (0.1, 0.049, "higher"),
        (-0.1, 0.049, "lower"),
        (0.1, 0.051, "no difference shown"),
        (0.1, None, "one seed"),
    ],
)
def test_a_verdict_is_the_corrected_test_at_five_percent(mean, p_holm, verdict):
    difference = Difference(mean, mean - 0.2, mean + 0.2, 5, p_t=0.01, p_flip=0.0625, p_holm=p_holm)
    assert verdict_of(difference) == verdict
    assert verdict_of(None) == "no seed in common"


def test_a_comparison_that_has_not_run_is_read(tmp_path):
    comparison = load_comparison(write_comparison(tmp_path, seeds=(1, 2)))
    study = read_study(comparison, "command")
    assert {run.status for run in study.runs} == {"missing"} and len(study.runs) == 12
    assert differences(study, PRIMARY) == {} and mean_value(study, "grpo", PRIMARY) is None


def test_expectations_are_decided_by_the_mean_difference(tmp_path):
    """Accuracies at the end are the level within a point or so, and 0.05 after a collapse."""
    study = compared(tmp_path, {"grpo": Course(collapses=3), "gspo": VARIANTS["gspo"]})
    ends = [values(study, name, PRIMARY) for name in ("gspo", "grpo")]
    points = 100 * (sum(ends[0].values()) - sum(ends[1].values())) / 3
    expected = [
        Expectation(higher="gspo", lower="grpo", points=points - 0.01),
        Expectation(higher="gspo", lower="grpo", points=points + 0.01),
        Expectation(higher="grpo", lower="gspo", points=1),
        Expectation(higher="grpo", lower="other", points=1),
    ]
    found = expectations(replace(study, expected=expected))
    assert [each.verdict for each in found] == [SEEN, NOT_SEEN, NOT_SEEN, UNTESTED]
    assert found[0].evidence.startswith(f"gspo less grpo: {points:+.1f} points, mean over seeds (")
    assert found[0].evidence.count("with seed") == 3
