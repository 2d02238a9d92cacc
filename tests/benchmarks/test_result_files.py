"""Results as files: one per machine, a pointer to the newest, one row per line."""

from __future__ import annotations

import json

import pytest

from benchmarks.result_files import LINE, latest_file, read_latest, to_json, write_result

RESULT = {"hardware": {"gpu": None, "cpu": "Fast CPU", "cores": 2}, "rows": [{"a": 1}], "date": "2026-01-02"}


def test_latest_names_the_newest_result(tmp_path):
    file = write_result(RESULT | {"partial": False}, tmp_path / "results")
    assert file.name == "fast-cpu-2-cores.json"
    assert json.loads((file.parent / "latest.json").read_text()) == {"result": file.name}
    assert latest_file(file.parent) == file
    assert read_latest(file.parent) == RESULT | {"partial": False}


def test_a_second_run_replaces_the_machine_s_result(tmp_path):
    for day in ("2026-01-02", "2026-01-03"):
        write_result(RESULT | {"partial": False, "date": day}, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fast-cpu-2-cores.json", "latest.json"]
    assert read_latest(tmp_path)["date"] == "2026-01-03"


def test_a_partial_result_leaves_the_latest_alone(tmp_path):
    write_result(RESULT | {"partial": False}, tmp_path)
    assert write_result(RESULT | {"partial": True}, tmp_path).name == "partial.json"
    assert read_latest(tmp_path)["partial"] is False


@pytest.mark.parametrize("text, error", [(None, OSError), ("{", ValueError), ("{}", KeyError)])
def test_without_a_pointer_there_is_no_latest_result(tmp_path, text, error):
    if text is not None:
        (tmp_path / "latest.json").write_text(text)
    with pytest.raises(error):
        latest_file(tmp_path)


def test_one_row_per_line():
    rows = [{"name": f"row {number}", "values": [1.5] * 20} for number in range(3)]
    data = {"date": "2026-01-02", "rows": rows * 4, "long": list(range(LINE)), "empty": [], "text": "a\nb"}
    text = to_json(data)
    assert json.loads(text) == data
    lines = [line.strip() for line in text.splitlines()]
    assert lines[1:5] == ['"date": "2026-01-02",', '"rows": [', *(f"{json.dumps(row)}," for row in rows[:2])]
