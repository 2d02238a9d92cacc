"""From which strength of the noise on a variant differs from the baseline, of runs with known accuracies."""

from pathlib import Path

import pytest

from megatron_gspo.tools.compare.dose_response import _curve, dose_charts, dose_findings, doses
from megatron_gspo.tools.compare.run_records import Run
from megatron_gspo.tools.compare.study import Group, Setting, Study
from megatron_gspo.tools.compare.study_files import write_report

RATES = {"both_05": 0.05, "both_25": 0.25, "both_10": 0.10}
SPREAD = (-0.01, 0.0, 0.01, 0.005, -0.005)  # of a variant's accuracy over the seeds


def study(gaps: dict[str, float], shared: str = "none", clean: float = 0.0) -> Study:
    """GRPO at 0.5 and R3 by `gaps` above it, by setting; each seed's own deviation is the same for both, but for a
    thousandth. clean: added to the accuracy where it is measured without noise."""
    settings = [Setting("base", "", {}), Setting("high_lr", "", {"optimizer.lr": 1e-3})]
    settings += [
        Setting(name, "", {"router_noise.engines": "both", "router_noise.target_flip_rate": rate})
        for name, rate in RATES.items()
    ]
    runs = []
    for setting, gap in gaps.items():
        for seed, deviation in enumerate(SPREAD, 1):
            for variant, value in (("grpo", 0.5), ("r3", 0.5 + gap + 0.001 * seed)):
                record = {"step": 60, "eval/accuracy": value + deviation}
                record["eval/accuracy_without_noise"] = record["eval/accuracy"] + clean
                config = {"router_noise": {"engines": "none" if setting == "base" else "both"}}
                runs.append(Run(setting, variant, seed, Path(), "finished", config=config, records=[record]))
    groups = [Group("grpo", "GRPO", {}), Group("r3", "GRPO + R3", {})]
    return Study("", groups, settings, [1, 2, 3, 4, 5], "grpo", runs, "", shared={"router_noise.engines": shared})


def test_settings_with_a_target_form_a_series_that_begins_without_noise():
    assert list(doses(study({})).items()) == [("both", {0.0: "base", 0.05: "both_05", 0.1: "both_10", 0.25: "both_25"})]
    assert list(doses(study({}, shared="rollout"))["both"]) == [0.05, 0.1, 0.25]  # the base has noise of its own


def test_a_single_rate_is_no_series():
    one = study({})
    one.settings[:] = [setting for setting in one.settings if setting.name in ("high_lr", "both_05")]
    one.shared.clear()
    assert doses(one) == {} and dose_charts(one, {"grpo": 0, "r3": 1}) == [] and dose_findings(one) == []


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((-0.003, -0.003, 0.1, 0.2), "ends above GRPO from 10 % on: +10.3 points"),
        ((-0.003, -0.003, -0.1, -0.2), "ends below GRPO from 10 % on: -9.7 points"),
        ((0.1, 0.1, 0.1, 0.1), "ends above GRPO at every rate: +10.3 points"),
        ((-0.003, 0.1, -0.003, 0.1), "ends above GRPO from 25 % on: +10.3 points"),
        ((-0.1, -0.1, 0.1, 0.1), "ends above GRPO from 10 % on: +10.3 points"),
        ((0.1, 0.1, 0.1, -0.003), "can't be told from GRPO at the highest rate, 25 %: +0.0 points"),
    ],
)
def test_the_rate_from_which_on_they_differ(gaps, expected):
    made = study(dict(zip(("base", "both_05", "both_10", "both_25"), gaps, strict=True)))
    line, clean = dose_findings(made)
    assert line.startswith(f"Noise in both engines: GRPO + R3 {expected} (95 % interval")
    assert clean == line.replace("engines:", "engines, none in evaluation:")


def test_a_chart_for_each_series():
    made = study(dict.fromkeys(("base", "both_05", "both_25"), 0.1), clean=0.2)
    noisy, clean = dose_charts(made, {"grpo": 0, "r3": 1})
    for svg in (noisy, clean):
        assert "Noise in both engines" in svg and svg.count('class="v-0"') == svg.count('class="v-1"') > 0
    assert "none in evaluation" in clean and "evaluation" not in noisy
    curve = _curve(made, "grpo", {0.0: "base", 0.25: "both_25"}, "clean_accuracy")
    assert curve.mean == pytest.approx([0.5, 0.7])


def test_the_report_begins_with_them(tmp_path):
    """And names the range of the rates, and of the strengths that were calibrated for them."""
    made = study(dict.fromkeys(("base", "both_05", "both_25"), 0.1))
    for run in made.runs:
        if run.setting != "base":
            run.config["router_noise"]["target_flip_rate"] = RATES[run.setting]
            run.records[0]["routing/noise_strength"] = RATES[run.setting] + 0.01 * run.seed
    write_report(made, tmp_path)
    page, picture = ((tmp_path / name).read_text() for name in ("report.html", "glance.svg"))
    assert page.index('<section id="doses">') < page.index('<section id="glance">')
    assert "Noise in both engines, none in evaluation" in picture and "Gradient norm" not in picture
    assert "routers of both engines, 5 to 25 % of the experts, strength 0.06 to 0.3." in page
