"""Which situations a known issue affects: versions, layout, and what is still unpatched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_gspo.patches.issue import KnownIssue, Situation
from megatron_gspo.patches.mark import MARK

ISSUE = KnownIssue("here", "megatron-core 0.16.1 - 0.18", "breaks", "link", "test", "later", lambda s: s.tensor > 1)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ("all", None),
        ("megatron-core 0.19.2", ("megatron-core", (0, 19, 2), (0, 19, 2))),
        ("megatron-core 0.16.1 - 0.19.2 without Apex", ("megatron-core", (0, 16, 1), (0, 19, 2))),
        ("sglang 0.5.15.post1 - 0.5.23 on a CPU", ("sglang", (0, 5, 15), (0, 5, 23))),
    ],
)
def test_the_range_of_versions(versions, found):
    assert replace(ISSUE, versions=versions).range == found


@pytest.mark.parametrize(
    ("version", "affected"),
    [((), False), ((0, 16), False), ((0, 16, 0), False), ((0, 16, 1), True), ((0, 16, 1, 3), True), ((0, 17), True),
     ((0, 18, 2), True), ((0, 19), False)],
)  # fmt: skip
def test_the_last_version_includes_its_patch_releases(version, affected):
    assert ISSUE.affects(Situation(megatron=version, tensor=2)) is affected
    assert not ISSUE.affects(Situation(megatron=version, tensor=1))


def test_sglang_s_range_is_compared_with_sglang_s_version():
    issue = replace(ISSUE, versions="sglang 0.5.20 - 0.5.23")
    assert issue.affects(Situation(megatron=(0, 1), sglang=(0, 5, 23), tensor=2))
    assert not issue.affects(Situation(megatron=(0, 5, 23), tensor=2))


def test_all_versions_and_choices_of_the_project():
    everywhere = replace(ISSUE, all_versions=True)
    assert everywhere.affects(Situation(megatron=(0, 99), tensor=2))
    assert not replace(everywhere, is_issue=False).affects(Situation(tensor=2))


def test_unpatched_functions_are_named(monkeypatch):
    issue = replace(ISSUE, marked=("math:sqrt", "math:cos"), present=("math:pi", "math:no_such_name"))
    monkeypatch.setattr(math, "cos", type("Patched", (), {MARK: None})())
    assert issue.unpatched() == ["math:sqrt", "math:no_such_name"]
    assert ISSUE.unpatched() == []
