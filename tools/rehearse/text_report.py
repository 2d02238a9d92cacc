"""A rehearsal as text: the verdict, one row a rank, and what each role does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from megatron_gspo.errors import show_bytes
from megatron_gspo.tools.plan.plan_report import table
from megatron_gspo.tools.rehearse.rehearsal_tables import (
    Rows,
    gib,
    micro_batches,
    overview,
    role_tables,
    same_roles,
)
from megatron_gspo.tools.rehearse.summary import CANNOT_PROVE, Rehearsal, problems
from megatron_gspo.tools.rehearse.time_tables import time_tables, waiting

_LAST_LINES = 12  # of a failed rank's output
_MOST_ROWS = 40  # of a table; the JSON document has all


def whole_report(rehearsal: Rehearsal, *, all_times: bool = False) -> str:
    """The rehearsal as printed. all_times: also of each class of operations and call site."""
    faults = problems(rehearsal)
    parts = [
        described(rehearsal),
        failure_list(faults) if faults else verdict(rehearsal),
        agreement(rehearsal),
    ]
    for failed in rehearsal.failed:
        parts.append(
            f"Rank {failed.rank} ended with:\n\n{_indented_end(failed.output)}"
            if failed.output
            else ""
        )
    if rehearsal.records:
        parts.append(table(overview(rehearsal.records)))
    for records in same_roles(rehearsal.records):
        ranks = ", ".join(str(record.rank) for record in records)
        parts.append(f"Rank{'s' if len(records) > 1 else ''} {ranks}: {micro_batches(records[0])}")
        parts += [_cut(rows) for rows in role_tables(records[0])]
        parts += [
            _cut(rows) for rows in time_tables(records[0], rehearsal.gpu, all_times=all_times)
        ]
        parts += waiting(records[0], rehearsal.gpu)
        parts.append(_bullets(records[0].notes))
    parts.append("A rehearsal cannot prove:\n" + _bullets(CANNOT_PROVE))
    return "\n\n".join(part for part in parts if part)


def described(rehearsal: Rehearsal) -> str:
    """One line: what was rehearsed."""
    return f"{rehearsal.config}, world {rehearsal.world:,}, {rehearsal.layout}: rehearsed on a CPU."


def failure_list(found: list[str]) -> str:
    """Each problem on a line."""
    return (
        f"{len(found)} problem{'s' if len(found) > 1 else ''} that would stop or corrupt a"
        f" run:\n{_bullets(found)}"
    )


def verdict(rehearsal: Rehearsal) -> str:
    """The sentence for a rehearsal without problems."""
    fullest = rehearsal.fullest
    gpu = rehearsal.gpu
    return (
        f"Nothing was found that would stop a run. Rank {fullest.rank} is the fullest:"
        f" {gib(fullest.memory.peak.total)} GiB of live tensors at its peak. {gpu.name} has"
        f" {gib(gpu.memory)} GiB, of which CUDA and NCCL take about"
        f" {show_bytes(rehearsal.runtime_bytes)}."
    )


def agreement(rehearsal: Rehearsal) -> str:
    """Which groups' collectives were compared, and which could not be."""
    comparison = rehearsal.comparison
    names = [f"{name} ({group.calls:,} calls)" for name, group in comparison.groups.items()]
    sentences = []
    if names and not comparison.disagreements:
        sentences.append(
            "The rehearsed members of each group make the same collectives in the same order, with"
            f" the same dtypes and sizes: {', '.join(names)}."
        )
    if comparison.alone:
        sentences.append(
            f"Not compared, since one member only was rehearsed: {', '.join(comparison.alone)}."
        )
    return " ".join(sentences)


def _indented_end(output: str) -> str:
    return textwrap.indent("\n".join(output.rstrip().splitlines()[-_LAST_LINES:]), "    ")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _cut(rows: Rows) -> str:
    rest = len(rows) - 1 - _MOST_ROWS
    return table(rows[: _MOST_ROWS + 1]) + (
        f"\n\n{rest} more rows are in the JSON document." if rest > 0 else ""
    )
