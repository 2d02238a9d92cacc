"""A report of synthetic runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.report import write_report
from megatron_gspo.tools.compare.study import read_study
from megatron_gspo.tools.compare.study_plan import load_comparison, planned_runs
from tests.tools.compare.synthetic import VARIANTS, write_comparison, write_run

COMMAND = "megatron-gspo compare compare.yaml"
NAMES = ("grpo", "grpo_r2", "gspo", "gspo_token")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[Path, object]:
    """A comparison in which one run failed and one is missing; its folder and its study."""
    folder = tmp_path_factory.mktemp("comparison")
    comparison = load_comparison(write_comparison(folder, seeds=(1, 2, 3), names=NAMES))
    for spec in planned_runs(comparison):
        course = VARIANTS[spec.variant]
        if (spec.variant, spec.seed) == ("grpo_r2", 3):
            course = replace(course, fails=7)
        if (spec.variant, spec.seed) == ("gspo_token", 3):
            continue
        write_run(spec.run_dir, spec.seed, course, steps=10)
    study = read_study(comparison, COMMAND)
    write_report(study, comparison.folder)
    return comparison.folder, study
