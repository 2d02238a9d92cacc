"""Run directories without a comparison file: what is one variant, and what is refused."""

import pytest

from megatron_gspo.tools.compare.finished_runs import study_of
from megatron_gspo.tools.compare.run_records import ReportError
from tests.tools.compare.synthetic import VARIANTS, Course, compared, write_run


def test_run_directories_are_grouped_by_what_they_are(tmp_path):
    study = compared(tmp_path, VARIANTS, seeds=(1, 2))
    assert [variant.name for variant in study.variants] == [*VARIANTS]
    assert study.baseline == "grpo" and study.seeds == [1, 2]
    assert study.variants[1].overrides["routing.replay"] == "r2"
    assert "optimizer.lr" not in study.variants[0].overrides  # the same in all


def test_groups_that_differ_in_a_key_are_named_by_it(tmp_path):
    fast = Course(overrides={"optimizer.lr": 1e-3})
    study = compared(tmp_path, {"slow": Course(), "fast": fast}, seeds=(1,))
    assert [variant.name for variant in study.variants] == ["grpo lr=0.0005", "grpo lr=0.001"]


def test_directories_that_cannot_be_compared(tmp_path):
    first = write_run(tmp_path / "a", 1, Course(), steps=5)
    with pytest.raises(ReportError, match="same settings and seed 1 as"):
        study_of([first, write_run(tmp_path / "b", 1, Course(), steps=5)], "")
    with pytest.raises(ReportError, match="is not a run directory"):
        study_of([tmp_path / "nowhere"], "")
    with pytest.raises(ReportError, match="baseline = gspo: is not a variant; set one of grpo"):
        study_of([first], "", baseline="gspo")


def names_of(tmp_path, *overrides, seeds=(1,), **common):
    courses = {str(i): Course(overrides={**common, **each}) for i, each in enumerate(overrides)}
    return [variant.name for variant in compared(tmp_path, courses, seeds=seeds).variants]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (  # where a run writes and logs tells nothing
            [
                {"optimizer.lr": 1e-4, "tracking.plot": False, "data.cache_dir": "/a"},
                {"optimizer.lr": 2e-4},
            ],
            ["grpo lr=0.0001", "grpo lr=0.0002"],
        ),
        (  # what an algorithm brings along is in its name already
            [{"algorithm.name": "gspo", "algorithm.epsilon_low": 3e-4}, {"algorithm.name": "dapo"}],
            ["gspo", "dapo"],
        ),
        (  # one key that tells them apart is enough; the report lists the others
            [{"optimizer.lr": 1e-4, "rollout.n_samples_per_prompt": 4}, {"optimizer.lr": 2e-4}],
            ["grpo lr=0.0001", "grpo lr=0.0002"],
        ),
        (
            [
                {"optimizer.lr": lr, "rollout.n_samples_per_prompt": n}
                for lr in (1e-4, 2e-4)
                for n in (4, 8)
            ],
            [f"grpo lr={lr} n_samples_per_prompt={n}" for lr in (0.0001, 0.0002) for n in (4, 8)],
        ),
        (
            [{"model.path": "/models/a/hf"}, {"model.path": "/models/b/hf"}],
            ["grpo path=a/hf", "grpo path=b/hf"],
        ),
        (
            [{"model.path": "/models/Qwen3-30B"}, {"model.path": "/models/Qwen3-4B/"}],
            ["grpo path=Qwen3-30B", "grpo path=Qwen3-4B"],
        ),
        ([{}, {"lora.rank": 8}], ["grpo rank=None", "grpo rank=8"]),
    ],
)
def test_names_come_from_what_changes_results(tmp_path, overrides, names):
    assert names_of(tmp_path, *overrides) == names


def test_seeds_and_keys_without_effect_make_one_variant(tmp_path):
    paths = [
        write_run(
            tmp_path / str(seed),
            seed,
            Course(overrides={"sglang.urls": [f"http://a:{seed}"]}),
            steps=5,
        )
        for seed in (1, 2, 3)
    ]
    study = study_of(paths, "")
    assert (
        [variant.name for variant in study.variants] == ["grpo"]
        and study.seeds == [1, 2, 3]
        and study.notes == []
    )


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    path = write_run(tmp_path / "a", 1, Course(), steps=5)
    study = study_of([path, path / ".." / "a"], "")
    assert len(study.runs) == 1


def test_unequal_runs_are_noted(tmp_path):
    long, short = (
        write_run(tmp_path / "a", 1, Course(), steps=20),
        write_run(tmp_path / "b", 1, Course(), steps=10),
    )
    open_run = write_run(tmp_path / "c", 2, Course(), steps=10)
    (open_run / "summary.json").unlink()
    study = study_of([long, short, open_run], "")
    assert [variant.name for variant in study.variants] == ["grpo steps=20", "grpo steps=10"]
    assert study.notes == [
        f"{open_run} is not finished (step 10 of 10): its curve is shown, it is not compared.",
        (
            "The variants differ in training.steps 20, 10: differences of their accuracies are not"
            " of the algorithm alone."
        ),
    ]


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("config.yaml", "algorithm: ppo\nmodel: {path: x}\n", "algorithm is not a section there"),
        (
            "config.yaml",
            "trainer: {n_gpus: 8}\nactor_rollout_ref: {}\n",
            "is not a config of a run of this program",
        ),
        ("config.yaml", "- a\n- b\n", "is not a mapping of keys"),
        ("config.yaml", "a: [\n", "cannot be read"),
        ("metrics.jsonl", '{"step": "one", "loss": 1.0}\n', "record 1 has step = 'one'"),
        ("metrics.jsonl", '{"step": 1, "loss": "1.0"}\n', "record 1 has loss = '1.0'"),
        ("metrics.jsonl", '{"step": 1, "loss": {"a": 1}}\n', "record 1 has loss = "),
    ],
)
def test_files_of_another_program_are_one_line(tmp_path, name, text, shown):
    path = write_run(tmp_path / "run", 1, Course(), steps=5)
    (path / name).write_text(text)
    with pytest.raises(ReportError, match=f"run/{name}: ") as refused:
        study_of([path], "")
    assert shown in str(refused.value) and "\n" not in str(refused.value)


def test_metrics_without_a_config_are_no_run(tmp_path):
    path = write_run(tmp_path / "run", 1, Course(), steps=5)
    (path / "config.yaml").unlink()
    with pytest.raises(ReportError, match="is not a run directory"):
        study_of([path], "")
