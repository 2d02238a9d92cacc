"""The report: a line for each finding, and their number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_gspo.errors import printable
from megatron_gspo.tools.doctor.findings import LEVELS, Finding, describe_ranks, worst

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
_VERDICTS = {
    "ok": "the run can start",
    "note": "the run can start",
    "warning": "it can start; read the warnings first",
    "error": "it can't work as it is",
}


def lines(findings: Sequence[Finding]) -> list[str]:
    """The text of each, with the ranks that found it where the ranks that looked differ."""
    looked: dict[str, set[int]] = defaultdict(set)
    for finding in findings:
        looked[finding.check] |= set(finding.ranks)
    return [
        (
            f"{describe_ranks(finding.ranks)}: {finding.line}"
            if finding.ranks and set(finding.ranks) != looked[finding.check]
            else finding.line
        )
        for finding in findings
    ]


def write_text(findings: Sequence[Finding], stream: TextIO) -> None:
    """A line for each finding, by theme; folded and coloured in a terminal, whole and plain in
    a pipe.
    """
    console = Console(file=stream, highlight=False)
    width = max((len(finding.check) for finding in findings), default=0)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding, line in zip(findings, lines(findings), strict=True):
            style = _STYLES[finding.level]
            table.add_row(
                Text(finding.level, style), Text(finding.check, "dim"), Text(printable(line))
            )
        console.print(table)
        console.print(Text(summary(findings), _STYLES[worst(findings)]))
    else:
        for finding, line in zip(findings, lines(findings), strict=True):
            print(f"{finding.level:<7}  {finding.check:<{width}}  {printable(line)}", file=stream)
        print(summary(findings), file=stream)
    stream.flush()


def summary(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 warning, 3 notes, 12 ok: it can't work as it is`."""
    counts = [
        (level, sum(finding.level == level for finding in findings)) for level in reversed(LEVELS)
    ]
    words = [
        f"{count} {level}{'s' if count != 1 and level != 'ok' else ''}"
        for level, count in counts
        if count
    ]
    return f"{', '.join(words) or 'nothing was checked'}: {_VERDICTS[worst(findings)]}"
