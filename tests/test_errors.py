"""Errors as one line for the user: exit codes, units, paths, reasons and fixes."""

from __future__ import annotations

import errno

import pytest

from megatron_gspo.errors import (
    DiskError,
    InputError,
    RunError,
    describe_disk,
    printable,
    report,
    writing,
)


@pytest.mark.parametrize(
    "number, fix",
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "make it writable"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_a_disk_error_has_reason_room_and_fix(number, fix, tmp_path):
    line = describe_disk(tmp_path / "a" / "b", OSError(number, "It Failed"), needed=2**20)
    assert line.startswith(f"{tmp_path}/a/b: cannot be written: it failed (1.0 MiB needed, ")
    assert fix in line and "\n" not in line


def test_writing_turns_an_os_error_into_a_disk_error_and_leaves_others(tmp_path):
    with pytest.raises(DiskError, match="no such file or directory"), writing(tmp_path):
        (tmp_path / "none" / "file").write_text("")
    with pytest.raises(InputError, match="mine"), writing(tmp_path):
        raise InputError("mine")
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError("a bug")


def test_control_characters_of_foreign_text_are_shown_and_not_obeyed(capsys):
    assert printable("plain, 数学 é ½ 👩‍🔬 a\u00a0b") == "plain, 数学 é ½ 👩‍🔬 a\u00a0b"
    assert printable("a\x1b[2Jb\x9b1mc\r\n\td\x00\x7f") == "a\\x1b[2Jb\\x9b1mc\\r\\n\\td\\x00\\x7f"
    assert printable("\u202eevil\u2066 \u2028 \ud800") == "\\u202eevil\\u2066 \\u2028 \\ud800"
    report(RunError("server a answered 500: \x1b]0;owned\x07"))
    assert capsys.readouterr().err == "error: server a answered 500: \\x1b]0;owned\\x07\n"
