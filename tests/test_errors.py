"""Errors as one line for the user: exit codes, units, paths, reasons and fixes."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.errors import (
    DiskError,
    EngineError,
    InputError,
    RunError,
    describe_disk,
    describe_value,
    existing_part,
    first_line,
    printable,
    report,
    show_bytes,
    writing,
)


def test_exit_codes():
    assert (
        InputError.exit_code,
        RunError.exit_code,
        EngineError.exit_code,
        DiskError.exit_code,
    ) == (2, 1, 1, 1)
    assert issubclass(InputError, ValueError) and issubclass(RunError, RuntimeError)


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (3 * 2**50, "3072.0 TiB"),
    ],
)
def test_bytes_have_a_unit(count, text):
    assert show_bytes(count) == text


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


def test_the_first_line_that_says_something():
    assert first_line("\n  \n first \nsecond") == "first"
    assert first_line(ValueError()) == "ValueError"


def test_the_existing_part_of_a_path(tmp_path):
    assert existing_part(tmp_path / "a" / "b") == tmp_path
    assert existing_part("/none/at/all") == Path("/")


def test_values_are_described_by_type():
    assert describe_value(np.zeros((2, 3), np.float32)) == "a 2-d float32 array"
    assert describe_value("text") == "str"


def test_control_characters_of_foreign_text_are_shown_and_not_obeyed(capsys):
    assert printable("plain, 数学 é ½ 👩‍🔬 a\u00a0b") == "plain, 数学 é ½ 👩‍🔬 a\u00a0b"
    assert printable("a\x1b[2Jb\x9b1mc\r\n\td\x00\x7f") == "a\\x1b[2Jb\\x9b1mc\\r\\n\\td\\x00\\x7f"
    assert printable("\u202eevil\u2066 \u2028 \ud800") == "\\u202eevil\\u2066 \\u2028 \\ud800"
    report(RunError("server a answered 500: \x1b]0;owned\x07"))
    assert capsys.readouterr().err == "error: server a answered 500: \\x1b]0;owned\\x07\n"
