"""The comparison file: what it refuses, in one line, and the runs that follow from it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gspo.config import ConfigError, load_config
from megatron_gspo.config.load import apply_overrides
from megatron_gspo.objectives.presets import PRESETS
from megatron_gspo.tools.compare.study_plan import (
    argument,
    load_comparison,
    planned_runs,
    resolve,
)
from tests.tools.compare.synthetic import EXAMPLES, write_comparison

COLLAPSE = EXAMPLES.parent / "collapse"


def test_the_collapse_example() -> None:
    """Four variants with four seeds under the same noise."""
    comparison = load_comparison(COLLAPSE / "small.yaml")
    configs = [resolve(comparison, spec) for spec in planned_runs(comparison)]
    assert len(configs) == 16 and len({config.run_dir for config in configs}) == 16
    kinds = {(config.algorithm.name, config.routing.replay) for config in configs}
    assert kinds == {("grpo", "none"), ("grpo", "r2"), ("grpo", "r3"), ("gspo", "none")}
    assert all(config.routing.perturbation_options == {"strength": 0.5} for config in configs)
    start = comparison.config.cold_start
    assert start is not None and load_config(COLLAPSE / start.config).algorithm.is_supervised


def test_the_study_of_score_centering() -> None:
    """Beside the other corrections, with five seeds."""
    comparison = load_comparison(COLLAPSE / "centering.yaml")
    configs = [resolve(comparison, spec) for spec in planned_runs(comparison)]
    assert len(configs) == 25
    kinds = {
        (config.algorithm.name, config.algorithm.rollout_is, config.algorithm.score_centering)
        for config in configs
        if config.routing.replay == "none"
    }
    plain = {("grpo", "none", 0), ("grpo", "token", 0), ("gspo", "none", 0)}
    assert kinds == plain | {("grpo", "none", 16)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_comparison(tmp_path, seeds=(1, 2))


def changed(file: Path, **changes: Any) -> Path:
    data = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    return file


def test_a_variants_keys_come_after_those_of_every_run(file):
    overrides = {"training.steps": 30, "optimizer.lr": 1e-4}
    variants = [
        {"name": "grpo", "overrides": {"algorithm.name": "grpo"}},
        {"name": "fast", "overrides": {"algorithm.name": "grpo", "optimizer.lr": 2e-4}},
    ]
    comparison = load_comparison(changed(file, overrides=overrides, variants=variants))
    slow, fast = (resolve(comparison, run) for run in planned_runs(comparison)[:2])
    assert (slow.optimizer.lr, fast.optimizer.lr) == (1e-4, 2e-4)
    assert (slow.seed, slow.training.steps) == (1, 30)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"variant": []}, "variant = []: is not a key"),
        ({"baseline": "ppo"}, 'baseline = "ppo": is not a variant; set one of grpo'),
        ({"seeds": [1, 1]}, "seeds = 1: appears twice"),
        ({"seeds": []}, "seeds = []: is not allowed"),
        (
            {"overrides": {"seed": 3}},
            "overrides.seed = 3: seed is set by the comparison; remove it",
        ),
        (
            {"overrides": {"optimizer.learning_rate": 1e-3}},
            "optimizer.learning_rate = 0.001: is not a key",
        ),
        ({"variants": [{"name": "High LR"}]}, "is not a folder name"),
        (
            {"variants": [{"name": "grpo"}, {"name": "grpo"}]},
            'variants.name = "grpo": appears twice',
        ),
        ({"overrides": {"training.global_batch_size": 7}}, "(in run grpo seed 1)"),
        ({"search": {"seeds": [101]}}, "search = "),
        ({"base": "nowhere.yaml"}, "cannot read the config"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(file, change, message):
    with pytest.raises(ConfigError) as caught:
        load_comparison(changed(file, **change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value, text",
    [
        ("r2", "r2"),
        ("true", '"true"'),
        (1e-6, "1e-06"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_an_override_reads_back_as_the_value_that_it_was(value, text):
    assert argument(value) == text
    assert apply_overrides({}, [f"key={text}"]) == {"key": value}


@pytest.mark.parametrize(
    ("name", "runs"), [("compare_small.yaml", 32), ("compare_objectives.yaml", 42)]
)
def test_the_comparisons_of_objectives_have_every_preset(name, runs):
    comparison = load_comparison(EXAMPLES / name)
    specs = planned_runs(comparison)
    assert len(specs) == runs
    assert {resolve(comparison, run).algorithm.name for run in specs} == {*PRESETS} - {"sft"}


def test_the_comparison_of_a_teacher_and_a_reward_loads():
    comparison = load_comparison(EXAMPLES.parent / "distillation" / "compare_reward.yaml")
    configs = [resolve(comparison, run) for run in planned_runs(comparison)]
    assert [config.distillation.is_on for config in configs] == [False, True] * 3
    sizes = {config.rollout.sequences for config in configs}
    assert len(sizes) == 1 and {config.optimizer.lr for config in configs} == {5e-4}


def test_the_file_in_the_documentation_loads(tmp_path):
    page = (EXAMPLES.parents[1] / "docs" / "comparison.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    text = text.replace("my_run.yaml", str(EXAMPLES / "tiny_gspo.yaml"))
    (tmp_path / "mine.yaml").write_text(text)
    comparison = load_comparison(tmp_path / "mine.yaml")
    assert len(planned_runs(comparison)) == 15
