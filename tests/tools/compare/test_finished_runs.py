"""Run directories without a comparison file: what is one variant, and what is refused."""

from pathlib import Path

import pytest
import yaml

from megatron_gspo.errors import InputError
from megatron_gspo.tools.compare.__main__ import main
from megatron_gspo.tools.compare.finished_runs import study_of_runs
from tests.tools.compare.synthetic import write_run


def run_of(folder: Path, *, algorithm: str = "grpo", seed: int = 1, **sections: object) -> Path:
    """A run whose config has these sections."""
    write_run(folder, [0.2, 0.4])
    config = {"seed": seed, "run_dir": str(folder), "algorithm": {"name": algorithm}} | sections
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_runs_that_differ_in_their_seed_are_one_variant(tmp_path):
    paths = [
        run_of(tmp_path / "grpo_1", seed=1, sglang={"urls": ["http://a:1"]}),
        run_of(tmp_path / "grpo_2", seed=2, sglang={"urls": ["http://a:2"]}),
        run_of(tmp_path / "gspo_1", algorithm="gspo", seed=1),
    ]
    study = study_of_runs(paths, "compare", baseline=None)
    assert [(run.variant, run.seed) for run in study.runs] == [
        ("grpo_1", 1),
        ("grpo_1", 2),
        ("gspo_1", 1),
    ]
    assert study.baseline == "grpo_1"
    assert [variant.overrides for variant in study.variants] == [
        {"algorithm.name": "grpo"},
        {"algorithm.name": "gspo"},
    ]


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path):
    paths = [run_of(tmp_path / name / "run", algorithm=name) for name in ("grpo", "gspo")]
    study = study_of_runs([*paths, paths[0] / ".." / "run"], "compare", baseline="gspo/run")
    assert [variant.name for variant in study.variants] == ["run", "gspo/run"]
    assert len(study.runs) == 2


def test_what_is_refused(tmp_path):
    first = run_of(tmp_path / "a")
    with pytest.raises(InputError, match="b: same settings and seed 1 as .*a, but for keys"):
        study_of_runs([first, run_of(tmp_path / "b")], "", baseline=None)
    with pytest.raises(InputError, match="no config.yaml"):
        study_of_runs([tmp_path / "nowhere"], "", baseline=None)
    with pytest.raises(InputError, match="--baseline gspo: is not a variant; give one of a"):
        study_of_runs([first], "", baseline="gspo")


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("config.yaml", "trainer: {n_gpus: 8}\n", "is not the config of a run of this program"),
        ("config.yaml", "a: [\n", "config.yaml"),
        ("metrics.jsonl", '{"step": "one", "loss": 1.0}\n', "record 1 has step = 'one'"),
    ],
)
def test_files_of_another_program_are_one_line(tmp_path, capsys, name, text, shown):
    run = run_of(tmp_path / "run")
    (run / name).write_text(text)
    assert main(["--runs", str(run)]) == 2
    said = capsys.readouterr().err
    assert shown in said
    assert "Traceback" not in said


def test_a_report_of_finished_runs(tmp_path, capsys):
    runs = [run_of(tmp_path / name, algorithm=name) for name in ("grpo", "gspo")]
    output = tmp_path / "report"
    assert main(["--runs", *map(str, runs), "--output", str(output)]) == 0
    assert str(output / "report.html") in capsys.readouterr().out
    page = (output / "report.html").read_text()
    assert "algorithm.name=gspo" in page
    assert "Cost of a step" in page
    assert main([]) == 2
    assert "give a comparison file, or run directories after --runs" in capsys.readouterr().err
