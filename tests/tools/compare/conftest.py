"""A report of synthetic runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.study import read_study
from megatron_gspo.tools.compare.study_files import write_report
from megatron_gspo.tools.compare.study_plan import load_comparison, report_runs, search_runs
from tests.tools.compare.synthetic import VARIANTS, write_comparison, write_run

COMMAND = "megatron-gspo compare compare.yaml"
NAMES = ("grpo", "grpo_r2", "gspo", "gspo_token")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[Path, object]:
    """A comparison in which one GRPO run failed under stress and one run is missing; its folder and its study."""
    folder = tmp_path_factory.mktemp("comparison")
    comparison = load_comparison(write_comparison(folder, seeds=(1, 2), names=NAMES))
    for spec in (*report_runs(comparison, {}), *search_runs(comparison)):
        course = VARIANTS[spec.variant]
        if spec.setting == "high_lr" and spec.variant == "grpo":
            course = replace(course, fails=7)
        if spec.setting == "high_lr" and spec.variant == "gspo_token" and spec.seed == 2:
            continue
        write_run(spec.run_dir, spec.seed, replace(course, overrides={**course.overrides, **spec.overrides}), steps=10)
    study = read_study(comparison, COMMAND)
    write_report(study, comparison.folder)
    return comparison.folder, study
