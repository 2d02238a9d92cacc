"""Which weights a directory, a run or URLs stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.evaluate.targets import default_output, find_targets, is_run, server_urls


def test_urls():
    assert (
        server_urls("http://a:1/,https://b:2") == ("http://a:1", "https://b:2")
        and server_urls("models/a") == ()
    )
    with pytest.raises(InputError, match="MODEL: .*: give http://host:port"):
        server_urls("http://user:secret@a:1")
    (target,) = find_targets("http://a:1,http://b:1", "models/a", None)
    assert (
        target.urls == ("http://a:1", "http://b:1")
        and str(target.folder) == "models/a"
        and not target.is_checkpoint
    )


def model(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def run(folder, *steps, exported=None):
    """A run's directory with the files that tell its steps; its checkpoints are empty."""
    source = model(folder.parent / "source")
    folder.mkdir()
    (folder / "config.yaml").write_text(f"model: {{path: {source}}}\n")
    for step in steps:
        path = folder / "checkpoints" / f"step_{step:06d}"
        path.mkdir(parents=True)
        (path / "state.json").write_text(json.dumps({"state": {}, "files": {}}))
    if exported is not None:
        model(folder / "hf")
        (folder / "summary.json").write_text(json.dumps({"step": exported}))
    return folder, source


def test_a_model_directory(tmp_path):
    folder = model(tmp_path / "Qwen")
    (target,) = find_targets(str(folder), str(folder), None)
    assert (target.label, target.folder, target.step, target.urls) == ("Qwen", folder, None, ())
    assert not is_run(str(folder)) and target.identity["files"].keys() == {"config.json"}


def test_a_run_is_its_trained_model_or_its_newest_checkpoint(tmp_path):
    folder, source = run(tmp_path / "run", 20, 40, exported=50)
    (target,) = find_targets(str(folder), "unused", None)
    assert (target.label, target.step, target.folder, target.is_checkpoint) == (
        "step_000050",
        50,
        folder / "hf",
        False,
    )
    (folder / "hf" / "config.json").unlink()
    (newest,) = find_targets(str(folder), "unused", None)
    assert (newest.step, newest.folder.name, newest.source, newest.is_checkpoint) == (
        40,
        "step_000040",
        source,
        True,
    )


def test_steps_of_a_run(tmp_path):
    folder, _ = run(tmp_path / "run", 20, 40, 50, exported=50)
    targets = find_targets(str(folder), "unused", "all")
    assert [(target.step, target.is_checkpoint) for target in targets] == [
        (20, True),
        (40, True),
        (50, False),
    ]
    assert [target.step for target in find_targets(str(folder), "unused", "40, 20,40")] == [20, 40]
    (folder / "checkpoints" / "step_000020" / "state.json").unlink()  # incomplete
    with pytest.raises(
        InputError, match="no step '20'; it has 40, 50 .checkpoint.keep limits them"
    ):
        find_targets(str(folder), "unused", "20")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (None, "is no Hugging Face directory, run directory or server"),
        ("all", "is no run directory .it has no config"),
    ],
)
def test_what_is_nothing(tmp_path, steps, message):
    with pytest.raises(InputError, match=message):
        find_targets(str(tmp_path / "absent"), "unused", steps)


def test_each_model_has_an_output_of_its_own(tmp_path, monkeypatch):
    """Every trained model's directory is called hf."""
    monkeypatch.chdir(tmp_path)
    folders = [model(tmp_path / name / "hf") for name in ("a/gspo", "b/gspo", "grpo")] + [
        model(tmp_path / "Qwen")
    ]
    outputs = [default_output(str(folder), str(folder)) for folder in folders]
    assert len(set(outputs)) == 4 and {output.parent for output in outputs} == {
        Path("runs/evaluation")
    }
    assert [output.name.rpartition("-")[0] for output in outputs] == [
        "gspo_hf",
        "gspo_hf",
        "grpo_hf",
        "Qwen",
    ]
    # The same model, so that it continues.
    assert default_output("a/gspo/hf/", "unused") == outputs[0]
    (tmp_path / "best").symlink_to(folders[1])
    assert default_output("best", "best") == outputs[1]
    folder, _ = run(tmp_path / "run", 20)
    assert default_output(str(folder), str(folder)) == folder / "evaluation"


def test_the_model_of_an_earlier_end_is_not_the_newest_step(tmp_path):
    """A run that continues has no summary until its end."""
    folder, _ = run(tmp_path / "run", 20, 40, exported=20)
    (folder / "summary.json").unlink()
    targets = find_targets(str(folder), "unused", "all")
    assert [(target.step, target.is_checkpoint) for target in targets] == [(20, True), (40, True)]
    (newest,) = find_targets(str(folder), "unused", None)
    assert newest.step == 40 and newest.is_checkpoint


def test_rollouts_and_backups_do_not_make_other_weights(tmp_path):
    folder, _ = run(tmp_path / "run", 20)
    (target,) = find_targets(str(folder), "unused", None)
    before = target.identity
    for name in (
        "rollout.bin",
        "rollout.bin.tmp",
        ".DS_Store",
        "state.json~",
        "state.json.bak",
        ".state.json.swp",
    ):
        (target.folder / name).write_text("x")
    assert target.identity == before
    (target.folder / "__0_0.distcp").write_text("x")
    assert target.identity != before
