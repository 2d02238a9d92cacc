"""Files of users that config keys name."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.user_code import load_user_function

FILE = """
calls = []


def add(call):
    calls.append(call)


def count():
    return len(calls)
"""


def test_a_file_that_two_keys_name_is_run_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    load_user_function("algorithm.surrogate", f"{file}:add")("one")
    assert load_user_function("algorithm.advantage", f"{file}:count")() == 1


def test_a_changed_file_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    load_user_function("algorithm.surrogate", f"{file}:add")("one")
    file.write_text(FILE.replace("calls = []", "calls = [0, 0]"))
    assert load_user_function("algorithm.advantage", f"{file}:count")() == 2
