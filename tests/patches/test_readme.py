"""patches/README.md has the tables of known_issues.py: every patch, its upstream place and a
test that exists.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megatron_gspo.patches.known_issues import KNOWN_ISSUES, PATCHES
from megatron_gspo.patches.readme import cells, with_tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "patches" / "README.md").read_text()
HELPERS = {"__init__.py", "mark.py", "issue.py", "known_issues.py", "readme.py"}


def test_the_tables_are_up_to_date():
    assert with_tables(README) == README, "run python -m megatron_gspo.patches.readme"


def test_every_file_is_in_the_table():
    listed = {
        found[1] for issue in PATCHES if (found := re.match(r"`([\w/]+\.py)`", issue.handled_by))
    }
    folder = ROOT / "patches"
    assert (
        listed == {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")} - HELPERS
    )


@pytest.mark.parametrize("row", map(cells, KNOWN_ISSUES), ids=lambda row: row[0].replace("`", ""))
def test_every_entry_has_versions_a_place_and_tests(row):
    assert len(row) == 6 and all(row) and not any(" | " in cell for cell in row)
    _, versions, _, place, tests, _ = row
    assert re.match(r"all|(megatron-core|sglang) \d+\.\d+\.\d+", versions)
    assert re.search(r"https://github\.com/(NVIDIA/Megatron-LM|sgl-project/sglang)/", place)
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tests)
    assert named, "no test"
    for path, function in named:
        functions = {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert not function or function in functions, f"{path}::{function}"
