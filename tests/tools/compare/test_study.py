"""From run directories to figures, differences and verdicts."""

import pytest

from megatron_gspo.tools.compare.statistics import Difference
from megatron_gspo.tools.compare.study import (
    PRIMARY,
    differences,
    read_study,
    run_counts,
    values,
    verdict_of,
)
from megatron_gspo.tools.compare.study_plan import load_comparison, planned_runs
from tests.tools.compare.synthetic import study_of, write_comparison, write_run


def test_every_run_is_counted(tmp_path):
    comparison = load_comparison(write_comparison(tmp_path, seeds=(1, 2, 3, 4), names=("grpo",)))
    whole, collapsed, failed, half = (spec.run_dir for spec in planned_runs(comparison))
    write_run(whole, [0.2, 0.6])
    write_run(collapsed, [0.2, 0.6, 0.1])
    write_run(failed, [0.2, 0.5], error="no memory")
    write_run(half, [0.2, 0.5])
    (half / "summary.json").unlink()
    study = read_study(comparison, "")
    assert run_counts(study.runs) == "2 finished, 1 failed, 1 incomplete, 1 collapsed"
    # the failed one counts with what it had, the open one not
    assert values(study, "grpo", PRIMARY) == {1: 0.6, 2: 0.1, 3: 0.5}


def test_differences_are_paired_and_corrected(tmp_path):
    study = study_of(
        tmp_path, {"grpo": (0.5, 0.6, 0.4), "grpo_r2": (0.6, 0.6, 0.6), "gspo": (0.9, 0.9, 0.8)}
    )
    compared = differences(study, PRIMARY)
    assert set(compared) == {"grpo_r2", "gspo"}
    assert compared["gspo"].mean == pytest.approx((0.4 + 0.3 + 0.4) / 3)
    raw = sorted(difference.p_t for difference in compared.values())
    corrected = sorted(difference.p_holm for difference in compared.values())
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
    difference = Difference(mean, mean - 0.2, mean + 0.2, 5, p_t=0.01, p_holm=p_holm)
    assert verdict_of(difference) == verdict
    assert verdict_of(None) == "no seed in common"
