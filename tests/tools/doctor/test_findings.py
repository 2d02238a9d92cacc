"""Levels, exit codes, what several ranks have found, and how it is shown."""

from __future__ import annotations

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.doctor.findings import (
    THEMES,
    describe_ranks,
    error,
    examine,
    exit_code,
    merge,
    note,
    ok,
    worst,
)
from megatron_gspo.tools.doctor.report import lines
from tests.support.findings import ERROR, WARNING


@pytest.mark.parametrize(
    "findings, allow, code",
    [
        ([], False, 0),
        ([ok("run.start", "a"), note("versions.cuda", "b")], False, 0),
        ([ok("run.start", "a"), WARNING], False, 1),
        ([WARNING], True, 0),
        ([ERROR, WARNING, ok("run.start", "a")], False, 2),
        ([ERROR], True, 2),
    ],
)
def test_the_worst_decides_the_exit_code(findings, allow, code):
    assert exit_code(findings, allow_warnings=allow) == code


def test_equal_findings_of_ranks_are_one():
    found = merge(
        {1: [ok("run.start", "9 GiB"), WARNING], 0: [ok("run.start", "9 GiB")], 2: [ERROR]}
    )
    assert [(f.check, f.level, f.ranks) for f in found] == [
        ("run.start", "ok", (0, 1)),
        ("run.start", "warning", (1,)),
        ("config.check", "error", (2,)),
    ]
    assert merge({0: [ERROR]})[0].ranks == ()  # a single process needs no rank


def test_the_worst_stands_last_and_themes_stay_together():
    found = merge(
        {0: [ERROR, note("groups.tp", "x"), ok("groups.tp", "x"), note("versions.cuda", "x")]}
    )
    assert [f.level for f in found] == ["ok", "note", "note", "error"]
    assert [f.theme for f in found[1:3]] == ["versions", "groups"]
    assert worst(found) == "error"
    assert set(f.theme for f in found) <= set(THEMES)


def test_ranks_are_named_where_they_differ():
    same = merge({0: [ok("versions.cuda", "a")], 1: []})  # only the first rank of a host looks
    assert lines(same) == ["a"]
    differ = merge({0: [ok("versions.cuda", "a")], 1: [ok("versions.cuda", "b")]})
    assert lines(differ) == ["rank 0: a", "rank 1: b"]


def test_describe_ranks():
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([9, 0, 1, 2, 7]) == "ranks 0-2, 7, 9"


def test_a_check_that_crashes_is_a_finding_that_names_it():
    def crash():
        return [1 / 0]

    [found] = examine("run.prompts", crash)
    assert (found.level, found.check) == ("error", "run.prompts")
    assert (
        "this check crashed: ZeroDivisionError: division by zero (doctor/test_findings.py:"
        in found.what
    )

    def leave():
        raise SystemExit("no")

    assert "SystemExit" in examine("run.prompts", leave)[0].what


def test_a_package_that_a_check_needs():
    def needs():
        import no_such_package.part  # noqa: F401

    [found] = examine("model.weights", needs)
    assert found.what == "this check needs no_such_package, which isn't installed"
    assert found.fix == "pip install no_such_package"


def test_a_users_error_keeps_its_fix():
    def refuse():
        raise InputError("seed = -1: is negative; set 0 or more")

    assert examine("config.load", refuse) == [
        error("config.load", "seed = -1: is negative", "the run would stop there", "set 0 or more")
    ]
