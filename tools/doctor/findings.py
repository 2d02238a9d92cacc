"""Findings as plain data: one line each, from any rank, with levels and exit codes."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_gspo.errors import UserError, first_line

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")  # from best to worst
# In the order of the report; a check is named `theme.name`.
THEMES = (
    "versions",
    "known_issues",
    "config",
    "model",
    "run",
    "servers",
    "ranks",
    "groups",
)
EXIT_CODES = {"ok": 0, "note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    check: `theme.name`, stable for scripts. what: the fact, with its figures. why: its consequence.
    fix: what to do. Both are empty if nothing is wrong. ranks: the ranks that found it, () with one
    process.
    """

    level: Level
    check: str
    what: str
    why: str = ""
    fix: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def theme(self) -> str:
        return self.check.partition(".")[0]

    @property
    def line(self) -> str:
        """What, why and fix in one line."""
        return "; ".join(" ".join(part.split()) for part in (self.what, self.why, self.fix) if part)


def ok(check: str, what: str) -> Finding:
    return Finding("ok", check, what)


def note(check: str, what: str, why: str = "", fix: str = "") -> Finding:
    return Finding("note", check, what, why, fix)


def warning(check: str, what: str, why: str, fix: str) -> Finding:
    return Finding("warning", check, what, why, fix)


def error(check: str, what: str, why: str, fix: str) -> Finding:
    return Finding("error", check, what, why, fix)


def examine(check: str, action: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check. A ``UserError`` that it raises is an error finding; so is any other
    exception, as a crashed check: the doctor never ends in a traceback."""
    try:
        return list(action())
    except UserError as failure:
        return [failed(check, failure, "the run would stop there")]
    except (Exception, SystemExit) as failure:
        package = (getattr(failure, "name", None) or "").partition(".")[0]
        if isinstance(failure, ModuleNotFoundError) and package not in ("", "megatron_gspo"):
            what = f"this check needs {package}, which isn't installed"
            return [error(check, what, "what it checks is unknown", f"pip install {package}")]
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        where = f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"
        what = f"this check crashed: {type(failure).__name__}: {first_line(failure)} ({where})"
        return [error(check, what, "what it checks is unknown", "please report this line")]


def failed(check: str, failure: UserError, why: str) -> Finding:
    """A finding of an error, whose message ends with the fix after the last semicolon."""
    what, _, fix = str(failure).rpartition("; ")
    return error(check, what or fix, why, fix if what else "")


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def exit_code(findings: Iterable[Finding], *, allow_warnings: bool = False) -> int:
    """0: nothing worse than a note. 1: warnings, unless allowed. 2: errors."""
    code = EXIT_CODES[worst(findings)]
    return 0 if code == 1 and allow_warnings else code


def merge(by_rank: Mapping[int, Sequence[Finding]]) -> list[Finding]:
    """The findings of all ranks, sorted by ``in_order``; equal findings are one, with all its
    ranks.
    """
    ranks: dict[Finding, list[int]] = {}
    for rank in sorted(by_rank):
        for finding in by_rank[rank]:
            ranks.setdefault(Finding(**{**asdict(finding), "ranks": ()}), []).append(rank)
    several = len(by_rank) > 1
    merged = [
        Finding(**{**asdict(f), "ranks": tuple(sorted(set(where))) if several else ()})
        for f, where in ranks.items()
    ]
    return in_order(merged)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by level, the worst last, next to the summary; then by theme. Stable."""
    order = {theme: index for index, theme in enumerate(THEMES)}
    return sorted(
        findings,
        key=lambda finding: (LEVELS.index(finding.level), order.get(finding.theme, len(order))),
    )


def describe_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Redirect what packages print to stderr, so that only the report is on stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
