"""Levels, exit codes, what several ranks have found, and how it is shown."""

from __future__ import annotations

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.doctor.findings import (
    error,
    examine,
    exit_code,
    merge,
    note,
    ok,
    warning,
)

WARNING = warning("run.start", "1 GiB free", "it fills up", "free some")
ERROR = error("config.check", "seed = -1", "a run refuses it", "set 0")


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


def test_equal_findings_of_ranks_are_one_and_the_worst_stands_last():
    merged = merge(
        {1: [ok("run.start", "9 GiB"), WARNING], 0: [ok("run.start", "9 GiB")], 2: [ERROR]}
    )
    assert [(f.check, f.level, f.ranks) for f in merged] == [
        ("run.start", "ok", (0, 1)),
        ("run.start", "warning", (1,)),
        ("config.check", "error", (2,)),
    ]
    [alone] = merge({0: [ERROR]})
    assert alone.ranks == ()  # a single process needs no rank


def crash():
    return [1 / 0]


def leave():
    raise SystemExit("no")


def import_a_missing_package():
    import no_such_package.part  # noqa: F401


def refuse():
    raise InputError("seed = -1: is negative; set 0 or more")


@pytest.mark.parametrize(
    "check, what, fix",
    [
        (crash, "this check crashed: ZeroDivisionError: division by zero (doctor/test_", "report"),
        (leave, "this check crashed: SystemExit: no", "please report this line"),
        (
            import_a_missing_package,
            "this check needs no_such_package, which isn't installed",
            "pip install no_such_package",
        ),
        (refuse, "seed = -1: is negative", "set 0 or more"),
    ],
)
def test_a_check_that_fails_is_a_finding_with_a_fix(check, what, fix):
    [finding] = examine("run.prompts", check)
    assert (finding.level, finding.check) == ("error", "run.prompts")
    assert finding.what.startswith(what) and fix in finding.fix
