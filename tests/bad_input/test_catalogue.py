"""The catalogue as a whole: how many bad inputs it has, and that docs/troubleshooting.md explains each message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input import (
    test_config,
    test_disk,
    test_model,
    test_prompts,
    test_ranks,
    test_rewards,
    test_rollouts,
    test_routes,
)
from tests.support.command_line import Case

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
CASES: tuple[Case, ...] = (
    *test_config.CASES,
    *(case for case, _ in test_config.FILES),
    test_config.ALONE,
    *test_prompts.CASES,
    *test_model.CASES,
    *test_rollouts.CASES,
    *test_rollouts.DIVERGED,
    *test_routes.CASES,
    *test_rewards.CASES,
    *(case for case, _, _ in test_disk.CASES),
    test_disk.FULL_AGAIN,
    *test_ranks.CASES,
)


def test_the_catalogue_is_large_and_each_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 150


def test_the_readme_says_how_large() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"in {len(CASES)} tested cases" in readme and f"[{len(CASES)} messages](docs/troubleshooting.md)" in readme


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_message_is_explained(case: Case) -> None:
    assert case.phrase in PAGE.read_text(encoding="utf-8")
