"""Levels, exit codes, what several ranks have found, and how it is shown."""

from __future__ import annotations

import io

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.doctor.findings import (
    describe_ranks,
    error,
    examine,
    exit_code,
    merge,
    note,
    ok,
    warning,
)
from megatron_gspo.tools.doctor.report import lines, write_text

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


def test_ranks_are_named_where_they_differ():
    same = merge({0: [ok("versions.cuda", "a")], 1: []})  # only the first rank of a host looks
    assert lines(same) == ["a"]
    differ = merge({0: [ok("versions.cuda", "a")], 1: [ok("versions.cuda", "b")]})
    assert lines(differ) == ["rank 0: a", "rank 1: b"]
    assert describe_ranks([9, 0, 1, 2, 7]) == "ranks 0-2, 7, 9"


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


def test_piped_text_is_plain_and_each_finding_one_line():
    long = ok("run.start", "word " * 100 + "\nsecond line")
    stream = io.StringIO()
    write_text([long, WARNING], stream)
    first, second, summary = stream.getvalue().splitlines()
    assert first.startswith("ok       run.start  word word") and first.endswith("second line")
    assert second == "warning  run.start  1 GiB free; it fills up; free some"
    assert summary == "1 warning, 1 ok: it can start; read the warnings first"
    assert "\x1b" not in stream.getvalue()
