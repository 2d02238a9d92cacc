"""The command line of a config: what it prints and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import from_command_line


def test_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert from_command_line([str(file), "seed=3"], "usage: x").seed == 3
    for arguments in ([str(file), "seed=x"], ["seed=3"], []):
        with pytest.raises(SystemExit) as caught:
            from_command_line(arguments, "usage: x CONFIG.yaml")
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("config error: ") and error.count("\n") == 1


def test_one_rank_of_a_node_speaks(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        from_command_line([str(file), "seed=x"], "usage: x")
    assert capsys.readouterr().err == ""
