"""patches/README.md lists every patch, where the defect is upstream and a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "patches" / "README.md").read_text()
HELPERS = {"__init__.py", "mark.py", "defects.py"}


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    section = README.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


ENTRIES = rows("Patches") + rows("Guards")


def test_every_file_is_in_the_table():
    listed = {found[1] for row in rows("Patches") if (found := re.match(r"`([\w/]+\.py)`", row[0]))}
    folder = ROOT / "patches"
    assert listed == {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")} - HELPERS


@pytest.mark.parametrize("row", ENTRIES, ids=lambda row: row[0].replace("`", ""))
def test_every_entry_has_versions_a_place_and_tests(row):
    assert len(row) == 6 and all(row)
    _, versions, _, place, tests, _ = row
    assert re.match(r"all|(megatron-core|sglang) \d+\.\d+\.\d+", versions)
    assert re.search(r"https://github\.com/(NVIDIA/Megatron-LM|sgl-project/sglang)/", place)
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tests)
    assert named, "no test"
    for path, function in named:
        functions = {node.name for node in ast.parse((ROOT / path).read_text()).body
                     if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert not function or function in functions, f"{path}::{function}"
