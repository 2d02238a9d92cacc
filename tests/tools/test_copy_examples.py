"""Examples are copied whole, with their modes; a changed file is never overwritten."""

from __future__ import annotations

import os

import pytest

from megatron_gspo.tools.copy_examples import EXAMPLES, copy_examples, main


def test_every_file_is_copied_with_its_mode(tmp_path):
    files = copy_examples(tmp_path / "a" / "examples")
    assert files and all(file.is_file() for file in files)
    for file in files:
        source = EXAMPLES / file.relative_to(tmp_path / "a" / "examples")
        assert file.read_bytes() == source.read_bytes()
        assert os.access(file, os.X_OK) == os.access(source, os.X_OK)
    assert not [file for file in files if "__pycache__" in file.parts]


def test_copying_again_is_fine_and_a_changed_file_stops_it_before_anything_is_written(
    tmp_path, capsys
):
    files = copy_examples(tmp_path)
    assert copy_examples(tmp_path) == files
    kept = files[-1]
    lost = files[0]
    kept.write_text("mine")
    lost.unlink()
    with pytest.raises(FileExistsError, match="exists and differs"):
        copy_examples(tmp_path)
    assert kept.read_text() == "mine" and not lost.exists()
    assert main([str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("megatron-gspo examples: ") and shown.count("\n") == 1
