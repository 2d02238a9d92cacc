"""The comparison file: what it refuses, in one line, and the runs that follow from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gspo.algorithms.presets import PRESETS
from megatron_gspo.config import ConfigError, load_config
from megatron_gspo.config.load import apply_overrides
from megatron_gspo.tools.compare.study_plan import (
    argument,
    as_arguments,
    load_comparison,
    report_runs,
    resolve,
    search_runs,
)
from tests.tools.compare.synthetic import write_comparison

EXAMPLES = Path(__file__).parents[3] / "examples" / "qwen3_moe"


COLLAPSE = EXAMPLES.parent / "collapse"


def test_the_collapse_example() -> None:
    """Four variants with four seeds under the same noise; its prompts are right, and none is in both files."""
    comparison = load_comparison(COLLAPSE / "small.yaml")
    configs = [resolve(comparison, spec) for spec in report_runs(comparison, {})]
    assert len(configs) == 16 and len({config.run_dir for config in configs}) == 16
    kinds = {(config.algorithm.name, config.routing.replay) for config in configs}
    assert kinds == {("grpo", "none"), ("grpo", "r2"), ("grpo", "r3"), ("gspo", "none")}
    assert {(config.router_noise.engines, config.router_noise.strength) for config in configs} == {("both", 0.5)}
    assert len(comparison.config.expect) == 2
    start = comparison.config.cold_start
    assert start is not None and load_config(COLLAPSE / start.config).algorithm.is_supervised


@pytest.mark.parametrize(("suffix", "numbers"), [("", 16), ("_long", 52)])
def test_the_prompts_of_the_study(suffix: str, numbers: int) -> None:
    """The answers are right, and no prompt is in both files."""
    prompts: dict[str, dict[str, str]] = {}
    for name in ("train", "held_out"):
        lines = (COLLAPSE / f"{name}{suffix}.jsonl").read_text().splitlines()
        prompts[name] = {row["prompt"]: row["answer"] for row in map(json.loads, lines)}
        assert len(prompts[name]) == len(lines)
        for prompt, answer in prompts[name].items():
            first, step = map(int, prompt.rstrip(":").split("+"))
            assert answer == "".join(f"{(first + i * step) % 100:02d}" for i in range(1, numbers + 1))
    assert (len(prompts["train"]), len(prompts["held_out"])) == (560, 140)
    assert not prompts["train"].keys() & prompts["held_out"].keys()


@pytest.mark.parametrize(
    ("name", "runs", "trials"), [("dose_response", 260, 0), ("variants", 100, 0), ("variants_tuned", 50, 108)]
)
def test_the_files_of_the_study(name: str, runs: int, trials: int) -> None:
    """Each names its number of runs, and all start from the cold start of `make collapse`."""
    file = COLLAPSE / f"{name}.yaml"
    comparison = load_comparison(file)
    specs = [*report_runs(comparison, {}), *search_runs(comparison)]
    assert len(specs) == runs + trials and f"# {runs + trials} runs, " in file.read_text()
    assert comparison.config.cold_start == load_comparison(COLLAPSE / "small.yaml").config.cold_start
    noisy = [resolve(comparison, spec).router_noise for spec in specs]
    doses = {"none", "rollout", "trainer", "both"}
    assert {section.engines for section in noisy} == (doses if name == "dose_response" else {"both"})


def test_the_natural_causes() -> None:
    """No noise; six settings with what their names say, of the same prompts and responses, and one of them longer."""
    file = COLLAPSE / "natural.yaml"
    comparison = load_comparison(file)
    specs = report_runs(comparison, {})
    assert f"# {len(specs)} runs, " in file.read_text() and len({spec.setting for spec in specs}) == 1 + 6 + 1
    for spec in specs:
        config = resolve(comparison, spec)
        together = spec.setting in ("together", "together_longer")
        assert config.router_noise.engines == "none" and config.rollout.max_response_length >= 2 * 52 + 1
        assert config.training.steps == (60 if spec.setting == "together_longer" else 40)
        responses = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        updates = responses // config.training.global_batch_size
        assert updates == (32 if together or spec.setting == "updates_32" else 8)
        assert config.training.ppo_epochs == (2 if together or spec.setting == "two_epochs" else 1)
        assert config.rollout.max_staleness == (4 if together or spec.setting == "staleness_4" else 0)
        assert (config.algorithm.old_log_probs == "rollout") == (spec.setting == "rollout_log_probs")
        bfloat16 = together or spec.setting in ("bfloat16_engine", "rollout_log_probs")
        assert ("bfloat16" in config.sglang.server_args) == bfloat16 and config.model.dtype == "float32"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_comparison(tmp_path, seeds=(1, 2))


def changed(file: Path, **changes: Any) -> Path:
    data = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    return file


def without(file: Path, *names: str) -> list[dict[str, Any]]:
    return [variant for variant in yaml.safe_load(file.read_text())["variants"] if variant["name"] not in names]


def test_runs_are_settings_by_seeds_by_variants(file):
    comparison = load_comparison(file)
    runs = report_runs(comparison, {})
    assert len(runs) == 2 * 2 * 6  # base and one stress, two seeds, six variants
    assert [run.variant for run in runs[:3]] == ["grpo", "grpo_r2", "grpo_r3"]  # seeds outermost
    assert runs[0].run_dir == comparison.folder / "runs" / "base" / "grpo" / "seed_1"
    assert len({run.run_dir for run in (*runs, *search_runs(comparison))}) == 24 + 24


def test_every_searched_variant_has_the_same_number_of_trials(file):
    trials = search_runs(load_comparison(file))
    count = {name: sum(run.variant == name for run in trials) for name in ("grpo", "grpo_r2", "grpo_r3", "gspo")}
    assert set(count.values()) == {2 * 3}  # clip ranges by learning rates, one seed
    assert {run.variant for run in trials} == set(count)  # gspo_token and gspo_rollout take gspo's


def test_the_search_comes_after_the_variant_and_before_the_stress(file):
    comparison = load_comparison(file)
    chosen = {"gspo": {"optimizer.lr": 5e-4, "algorithm.epsilon_low": 0.02}}
    found = {
        run.setting: resolve(comparison, run)
        for run in report_runs(comparison, chosen)
        if run.variant == "gspo" and run.seed == 1
    }
    assert found["base"].optimizer.lr == 5e-4
    assert found["base"].algorithm.epsilon_low == 0.02
    assert found["high_lr"].optimizer.lr == 2e-3
    assert found["high_lr"].algorithm.epsilon_low == 0.02
    assert found["base"].seed == 1


def test_variants_share_prompts_seeds_budget_and_evaluation(file):
    comparison = load_comparison(file)
    runs = [run for run in report_runs(comparison, {}) if run.setting == "base" and run.seed == 2]
    configs = [resolve(comparison, run) for run in runs]
    for section in ("data", "rollout", "training", "evaluation", "model"):
        assert len({repr(getattr(config, section)) for config in configs}) == 1
    assert {config.seed for config in configs} == {2}


def test_arguments_are_what_the_command_line_reads(file):
    comparison = load_comparison(file)
    run = next(run for run in report_runs(comparison, {}) if run.variant == "gspo_rollout")
    arguments = as_arguments(comparison, run)
    assert "algorithm.old_log_probs=rollout" in arguments
    assert f"run_dir={run.run_dir}" in arguments and "seed=1" in arguments


@pytest.mark.parametrize(
    "change, message",
    [
        ({"variant": []}, "variant = []: is not a key"),
        ({"baseline": "ppo"}, 'baseline = "ppo": is not a variant; set one of grpo'),
        ({"expect": [{"higher": "x", "lower": "grpo", "points": 1}]}, 'expect.higher = "x": is not a variant'),
        ({"seeds": [1, 1]}, "seeds = 1: appears twice"),
        ({"seeds": []}, "seeds = []: is not allowed"),
        ({"seeds": [101]}, "search.seeds = 101: is also a seed of the report"),
        ({"search": None}, "has no effect without search"),
        ({"overrides": {"seed": 3}}, "overrides.seed = 3: seed is set by the comparison; remove it"),
        ({"overrides": {"optimizer.learning_rate": 1e-3}}, "optimizer.learning_rate = 0.001: is not a key"),
        ({"stress": [{"name": "base", "overrides": {}}]}, 'stress.name = "base": appears twice'),
        ({"stress": [{"name": "High LR", "overrides": {}}]}, "is not a folder name"),
        ({"stress": [{"name": "s", "overrides": {"training.global_batch_size": 7}}]}, "(in run s grpo seed 1)"),
        ({"stress": [{"name": "s", "overrides": {}, "variants": ["x"]}]}, 'stress.s.variants = "x": is not a variant'),
        ({"base": "nowhere.yaml"}, "cannot read the config"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(file, change, message):
    with pytest.raises(ConfigError) as caught:
        load_comparison(changed(file, **change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unequal_searches_are_refused(file):
    variants = without(file)
    variants[0]["clip"] = [[0.2, 0.27]]
    with pytest.raises(ConfigError, match="gives 2 clip ranges or candidates and grpo 1"):
        load_comparison(changed(file, variants=variants))


def test_candidates_are_searched_in_place_of_clip_ranges(file):
    variants = without(file)
    tried = [{"algorithm.max_weight": 5.0}, {"algorithm.max_weight": 2.0}]
    variants[0] = {"name": "cispo", "overrides": {"algorithm.name": "cispo"}, "candidates": tried}
    changes = {"variants": variants, "baseline": "cispo", "base": str(cispo_base(file.parent))}
    del variants[1:]
    comparison = load_comparison(changed(file, **changes, stress=[]))
    assert [spec.trial for spec in search_runs(comparison)] == [
        {**values, "optimizer.lr": lr} for values in tried for lr in (3e-4, 5e-4, 1e-3)
    ]
    assert {resolve(comparison, spec).algorithm.max_weight for spec in search_runs(comparison)} == {5.0, 2.0}
    variants[0]["clip"] = [[0.2, 0.27], [0.1, 0.1]]
    with pytest.raises(ConfigError, match="variants.cispo.candidates = .*: clip is given too"):
        load_comparison(changed(file, **changes, stress=[]))


def cispo_base(folder: Path) -> Path:
    """The example without a clip range, which CISPO doesn't have."""
    data = yaml.safe_load((EXAMPLES / "tiny_gspo.yaml").read_text())
    data["algorithm"] = {"name": "cispo"}
    (folder / "base.yaml").write_text(yaml.safe_dump(data))
    return folder / "base.yaml"


def test_tuned_as_needs_a_variant_that_is_searched(file):
    with pytest.raises(ConfigError, match='tuned_as = "gspo": is not a variant'):
        load_comparison(changed(file, variants=without(file, "gspo")))


@pytest.mark.parametrize(
    "value, text",
    [("r2", "r2"), ("true", '"true"'), ("1e-3", '"1e-3"'), ("", '""'), ("a: b", '"a: b"'), (1e-6, "1e-06"),
     (None, "null"), ([1, 2], "[1, 2]"), ({"a": "x"}, '{"a": "x"}')],
)  # fmt: skip
def test_an_override_reads_back_as_the_value_that_it_was(value, text):
    assert argument(value) == text
    assert apply_overrides({}, [f"key={text}"]) == {"key": value}


def test_top_level_keys_can_be_overridden(file):
    comparison = load_comparison(file, ["seeds=[7]", "stress=[]"])
    assert {run.seed for run in report_runs(comparison, {})} == {7}


@pytest.mark.parametrize("name", ["compare.yaml", "compare_small.yaml"])
def test_the_examples_load_and_hold_every_algorithm(name):
    comparison = load_comparison(EXAMPLES / name)
    runs = [run for run in report_runs(comparison, {}) if run.setting == "base"]
    kinds = {
        (config.algorithm.name, config.routing.replay, config.algorithm.old_log_probs)
        for config in (resolve(comparison, run) for run in runs)
    }
    for run in runs:  # the base config is GSPO's: its clip range would handicap GRPO
        config = resolve(comparison, run)
        if name == "compare_small.yaml" and config.algorithm.name == "grpo":
            assert (config.algorithm.epsilon_low, config.algorithm.epsilon_high) == (0.2, 0.27)
    assert kinds >= {
        ("grpo", "none", "recompute"),
        ("grpo", "r2", "recompute"),
        ("grpo", "r3", "recompute"),
        ("gspo", "none", "recompute"),
        ("gspo_token", "none", "recompute"),
        ("gspo", "none", "rollout"),
    }


@pytest.mark.parametrize(
    ("name", "runs", "trials"), [("compare_small.yaml", 32, 0), ("compare_objectives_tuned.yaml", 42, 84)]
)
def test_the_comparisons_of_objectives_have_every_preset(name, runs, trials):
    comparison = load_comparison(EXAMPLES / name)
    specs = report_runs(comparison, {})
    assert (len(specs), len(list(search_runs(comparison)))) == (runs, trials)
    assert {resolve(comparison, run).algorithm.name for run in specs} == {*PRESETS} - {"sft"}


def test_the_comparison_of_engines_varies_nothing_else():
    comparison = load_comparison(EXAMPLES / "compare_engines.yaml")
    ours, vllm = (resolve(comparison, run).dump() for run in report_runs(comparison, {})[:2])
    assert (ours["rollout"].pop("engine"), vllm["rollout"].pop("engine")) == ("embedded", "vllm")
    assert {key for key in ours if ours[key] != vllm[key]} == {"run_dir", "vllm"}
    assert len(comparison.config.seeds) >= 3


def test_the_file_in_the_documentation_loads(tmp_path):
    page = (EXAMPLES.parents[1] / "docs" / "comparison.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    text = text.replace("my_run.yaml", str(EXAMPLES / "tiny_gspo.yaml"))
    (tmp_path / "mine.yaml").write_text(text)
    comparison = load_comparison(tmp_path / "mine.yaml")
    assert len(report_runs(comparison, {})) == 20 + 12 and len(search_runs(comparison)) == 12
