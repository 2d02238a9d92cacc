"""Which entries of a folder are the program's, among what people keep there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_gspo.given_names import CHECKPOINTS, SAMPLES, move_aside

FOREIGN = (
    "step_best",
    "step_000001_best",
    "step_000001 (copy)",
    "step_000001.bak",
    "step_000002.tmp",
    "step_000001~",
    "step_1",
    "step_0000001",
    "step_00000١",
    "step_000001\n",
    "step_-00001",
    "Step_000001",
    ".DS_Store",
    "lost+found",
    "latest",
)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_that_the_program_does_not_give_is_not_its(tmp_path, name):
    (tmp_path / name).mkdir()
    assert CHECKPOINTS.step(name) is None and CHECKPOINTS.entries(tmp_path) == {}
    (tmp_path / f"{name}.jsonl").write_text("")
    assert SAMPLES.entries(tmp_path) == {}


def test_a_name_holds_its_step():
    for step in (0, 1, 999_999, 1_000_000, 12_345_678):
        assert CHECKPOINTS.step(CHECKPOINTS.file_name(step)) == step
        assert SAMPLES.step(SAMPLES.file_name(step)) == step
    assert SAMPLES.file_name(12) == "step_000012.jsonl"
    assert CHECKPOINTS.file_name(1_000_000) == "step_1000000"
    assert SAMPLES.step("step_000001.jsonl (copy)") is None
    assert SAMPLES.step("step_000001xjsonl") is None


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (1_000_000, 999_990, 20, 10_000_000):
        (tmp_path / CHECKPOINTS.file_name(step)).mkdir()
    assert list(CHECKPOINTS.entries(tmp_path)) == [20, 999_990, 1_000_000, 10_000_000]


def test_a_folder_may_itself_be_a_link_or_absent(tmp_path):
    (tmp_path / "disk" / "step_000007").mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    assert CHECKPOINTS.entries(tmp_path / "checkpoints") == {
        7: tmp_path / "checkpoints" / "step_000007"
    }
    (tmp_path / "file").write_text("")
    assert CHECKPOINTS.entries(tmp_path / "absent") == CHECKPOINTS.entries(tmp_path / "file") == {}


@pytest.mark.skipif(
    os.getuid() != 0 or not hasattr(os, "seteuid"), reason="needs another user to be"
)
def test_a_folder_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "checkpoints").mkdir(mode=0o700)
    code = (
        "import os, sys; from pathlib import Path; from megatron_gspo.given_names import"
        " CHECKPOINTS\nfrom megatron_gspo.errors import RunError; os.seteuid(65534)\ntry:"
        " CHECKPOINTS.entries(Path(sys.argv[1]))\nexcept RunError as error: print(error)"
    )
    os.chmod(tmp_path, 0o755)
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoints")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "checkpoints: cannot be read: permission denied; make it readable" in output
    assert output.count("\n") == 1


def test_moving_aside_never_overwrites(tmp_path, capsys):
    for number, name in enumerate(("step_000003.kept", "step_000003.kept_2", "step_000003.kept_3")):
        (tmp_path / "step_000003").symlink_to(tmp_path / f"target{number}")
        move_aside(tmp_path / "step_000003")
        assert os.readlink(tmp_path / name) == str(tmp_path / f"target{number}")
        said = (
            f"warning: {tmp_path}/step_000003 was there and is not this run's: it is now"
            f" {tmp_path}/{name}\n"
        )
        assert capsys.readouterr().err == said
