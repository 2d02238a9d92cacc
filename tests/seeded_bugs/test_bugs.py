"""The list of bugs fits the code, however that is formatted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.seeded_bugs.all_bugs import SEEDED_BUGS
from tests.seeded_bugs.seeded_bug import SeededBug

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("bug", SEEDED_BUGS, ids=lambda bug: bug.name)
def test_a_bug_fits_the_code(bug: SeededBug) -> None:
    source = (ROOT / bug.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(bug.apply(source))) != ast.dump(ast.parse(source))
    file, _, test = bug.test.partition("::")
    tests = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    assert test.partition("[")[0] in {getattr(node, "name", "") for node in tests}, bug.test


def test_no_bug_is_there_twice() -> None:
    assert len({bug.name for bug in SEEDED_BUGS}) == len(SEEDED_BUGS)
    assert len({(bug.file, bug.before, bug.after) for bug in SEEDED_BUGS}) == len(SEEDED_BUGS)


def test_the_page_says_how_many() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    assert f"[{len(SEEDED_BUGS)} of {len(SEEDED_BUGS)}](#seeded-bugs)" in page
