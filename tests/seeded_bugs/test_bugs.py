"""The list of bugs fits the code: each text occurs once, the changed file parses, the tests exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.equivalence.layouts import FAMILIES, LORA, layouts
from tests.seeded_bugs.all_bugs import SEEDED_BUGS
from tests.seeded_bugs.run import COPIED, check_imports, copy_project, main
from tests.seeded_bugs.seeded_bug import SeededBug

ROOT = Path(__file__).resolve().parents[2]


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def imported(file: Path) -> set[str]:
    """First words of the modules that a file imports, at its top or later."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    froms = {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return froms | {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def test_the_copy_holds_what_the_tests_import():
    tests = {ROOT / test.partition("::")[0] for bug in SEEDED_BUGS for test in bug.tests}
    own = {folder.name for folder in ROOT.iterdir() if folder.is_dir()}
    assert set().union(*map(imported, tests)) & own <= set(COPIED)


def test_every_file_is_imported_from_the_copy(tmp_path):
    (tmp_path / "empty").mkdir()
    check_imports(copy_project(tmp_path / "copy"), sorted({bug.file for bug in SEEDED_BUGS}))
    with pytest.raises(RuntimeError, match="cli.py is imported from .*, not the copy"):
        check_imports(tmp_path / "empty", ["megatron_gspo/cli.py"])


def test_the_page_says_how_many():
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    assert f"[{len(SEEDED_BUGS)} of {len(SEEDED_BUGS)}](#seeded-bugs)" in page


def test_there_are_enough_and_none_twice():
    assert len(SEEDED_BUGS) >= 20
    assert len({bug.name for bug in SEEDED_BUGS}) == len(SEEDED_BUGS)
    assert len({(bug.file, bug.before, bug.after) for bug in SEEDED_BUGS}) == len(SEEDED_BUGS)


@pytest.mark.parametrize("bug", SEEDED_BUGS, ids=lambda bug: bug.name)
def test_a_bug_fits_the_code(bug: SeededBug):
    source = (ROOT / bug.file).read_text(encoding="utf-8")
    assert source.count(bug.before) == 1, f"{bug.file}: {bug.before!r}"
    changed = source.replace(bug.before, bug.after)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), "the bug changes nothing"
    assert bug.tests
    names = {arrangement.name for moe in (True, False) for arrangement in layouts(moe=moe)}
    names |= {f"{family}-{arrangement.name}" for family, found in (FAMILIES | LORA).items() for arrangement in found}
    for test in bug.tests:
        file, _, function = test.partition("::")
        function, _, case = function.partition("[")
        assert function in functions(ROOT / file), test
        assert not case or case.removesuffix("]") in names, test


def test_words_that_no_bug_has_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py", "nothing-like-it"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "nothing-like-it: in no bug's name" in capsys.readouterr().err
