"""The messages of the catalogue in docs/troubleshooting.md."""

from __future__ import annotations

from tests.bad_input.page import CASES, FIXES, PAGE, filled


def test_each_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_the_page_has_the_messages_of_today() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), "python -m tests.bad_input.page"


def test_every_fix_belongs_to_a_case() -> None:
    assert set(FIXES) - {case.name for case in CASES} == set()
