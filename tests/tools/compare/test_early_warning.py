"""Rules that announce a decline, on runs with a known course."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gspo.config.training_sections import GuardConfig
from megatron_gspo.tools.compare import early_warning
from megatron_gspo.tools.compare.early_warning import (
    Outcome,
    Rule,
    alarm,
    choose,
    decline,
    default_guard,
    findings,
    guard_alarm,
    main,
    outcome,
)
from megatron_gspo.tools.compare.run_records import Run, read_run
from tests.tools.compare.synthetic import Course, write_run

ESS = "effective_sample_size"


def run(values, accuracies=(), seed=1, every=10):
    """values: the effective sample size by step from 1; accuracies: held-out, from step 0, `every` steps apart."""
    records = [{"step": step, ESS: value} for step, value in enumerate(values, 1)]
    records += [{"step": every * i, "eval/accuracy": value} for i, value in enumerate(accuracies)]
    return Run("", "", seed, Path(), "finished", records=records)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.3, 0.4, 0.5, 0.45], None),
        ([0.3, 0.5, 0.29, 0.2], 20),
        ([0.3, 0.2, 0.3, 0.31], None),  # it recovered
        ([0.3, 0.15, 0.3, 0.1, 0.05], 30),  # the first fall was another one
        ([0.2, 0.1], 10),
        ([0.3, 0.9, 0.3], None),  # all that it had learned, but no more
        ([], None),
    ],
)
def test_a_decline_is_a_fall_that_lasts(accuracies, expected):
    assert decline(run([], accuracies)) == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(ESS, True, 0.5, 1), 2),
        (Rule(ESS, True, 0.5, 2), 5),
        (Rule(ESS, True, 0.5, 3), None),
        (Rule(ESS, True, 0.4, 1), None),  # the threshold itself is not beyond
        (Rule(ESS, False, 0.85, 1), 1),
        (Rule(ESS, False, 0.9, 1), None),
        (Rule("grad_norm", False, 0.9, 1), None),
    ],
)
def test_an_alarm_is_the_first_row_of_steps_beyond_the_threshold(rule, expected):
    assert alarm(run([0.9, 0.4, 0.9, 0.4, 0.4]), rule) == expected


FALLS, LASTS = [0.5, 0.5, 0.2], [0.5, 0.5, 0.5]  # seen at step 20


def test_an_outcome_counts_alarms_before_declines_and_without():
    runs = [
        run([0.9] * 9 + [0.3] * 20, FALLS),  # alarm at 10
        run([0.9] * 24 + [0.3] * 5, FALLS),  # at 25: too late
        run([0.9] * 29, FALLS),
        run([0.9] * 29, LASTS),
        run([0.9] * 28 + [0.3], LASTS),
    ]
    found = outcome(runs, [alarm(made, Rule(ESS, True, 0.5, 1)) for made in runs])
    assert found == Outcome(declined=3, announced=1, leads=[10], healthy=2, false=1)
    assert found.score == pytest.approx(1 / 3 - 1 / 2) and found.lead == 10
    assert Outcome(0, 0, [], 0, 0).score == Outcome(0, 0, [], 0, 0).lead == 0


def test_the_chosen_rule_announces_most_and_then_earliest():
    runs = [
        run([0.9] * 5 + [0.6] * 5 + [0.2] * 19, FALLS),
        run([0.9] * 29, LASTS),
        run([0.9] * 4 + [0.3] + [0.9] * 24, LASTS),
    ]
    rule = choose(runs, ESS, True)
    assert rule is not None and 0.6 < rule.threshold <= 0.9 and rule.steps == 2
    assert outcome(runs, [alarm(made, rule) for made in runs]) == Outcome(1, 1, [13], 2, 0)
    assert choose(runs, "grad_norm", False) is None and choose([], ESS, True) is None


def test_the_guard_on_recorded_runs():
    guard = GuardConfig(effective_sample_size=0.5, mismatch_k3=0.1, steps=2)
    assert guard_alarm(run([0.9, 0.4, 0.9, 0.4, 0.4]), guard) == 5 and guard_alarm(run([0.9, 0.4, 0.9]), guard) is None
    apart = run([0.9] * 4)
    for record in apart.records:
        record["mismatch/k3"] = 0.2 if record["step"] > 2 else None
    assert guard_alarm(apart, guard) == 4


def test_the_default_guard_of_a_recorded_run(tmp_path):
    write_run(tmp_path / "run", 1, Course())
    recorded = read_run(tmp_path / "run", setting="", variant="")
    assert default_guard(recorded).effective_sample_size == 0.5
    bounded = {**recorded.config, "algorithm": {**recorded.config["algorithm"], "rollout_is": "token"}}
    assert default_guard(replace(recorded, config=bounded)).effective_sample_size is None


def test_rules_are_tested_on_other_runs_than_they_are_chosen_on():
    odd = [run([0.9] * 5 + [0.2] * 20, FALLS, seed=1), run([0.9] * 25, LASTS, seed=3)]
    even = [run([0.1] * 25, LASTS, seed=2), run([0.9] * 25, FALLS, seed=4)]
    [found] = findings([*odd, *even])
    assert found.chosen_on.score == 1 and found.tested_on.score == -1
    assert found.tested_on == Outcome(1, 0, [], 1, 1)


def test_main_prints_a_table_and_writes_json(tmp_path, capsys):
    for seed in (1, 2, 3, 4):
        write_run(tmp_path / "runs" / str(seed), seed, Course(collapses=20 if seed < 3 else None))
    assert main([str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("| rule | announced |") and "| 0 of 1 |" in text
    names = {row["rule"]["metric"] for row in json.loads((tmp_path / "found.json").read_text())}
    assert names == {name for name in early_warning.CANDIDATES if name in text} >= {ESS, "entropy"}


def test_a_folder_without_runs_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"report error: {tmp_path}: no finished run with a held-out accuracy; give the folder of a comparison\n"
    )
