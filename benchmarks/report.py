"""A result as Markdown: tables, missed targets with reasons, peers that were not compared, commands.

A *result* is what ``run_all.py`` writes: a dict of plain JSON. Used for its own output and for docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.common import Row, machine_kind, number, table

Result = Mapping[str, Any]


def rows_of(result: Result) -> list[Row]:
    """The rows, in the order in which they were measured."""
    return [Row.from_json(record) for record in result["rows"]]


def by_benchmark(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the benchmark that they belong to."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.benchmark, []).append(row)
    return groups


def select(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Rows whose ``benchmark/name/peer`` fits a pattern (``fnmatch``), pattern by pattern.

    Raises ``ValueError`` for a pattern that fits none.
    """
    chosen: list[Row] = []
    for pattern in patterns:
        found = [row for row in rows if fnmatchcase("/".join(row.key), pattern)]
        if not found:
            raise ValueError(f"no row of the result fits {pattern!r}")
        chosen += [row for row in found if row not in chosen]
    return chosen


def missed_by(row: Row) -> float:
    """How far a row lies from its target, as a share of the target; of a target of 0 the difference itself."""
    assert row.target is not None
    return abs(row.found - row.target) / (abs(row.target) or 1.0)


def missed(rows: Sequence[Row]) -> list[str]:
    """A line for each missed target: found, target, by how much, and the row's note."""
    lines = []
    for row in rows:
        if row.met is not False:
            continue
        sign, what = (">=" if row.better == "higher" else "<="), f" {row.unit}" if row.absolute else ""
        line = (f"{row.benchmark}: {row.name}, against {row.peer_name}: {number(row.found)}{what} for {sign} "
                f"{row.target:g}, {100 * missed_by(row):.0f} % off")  # fmt: skip
        lines.append(line + (f" ({row.note})" if row.note else ""))
    return lines


def machine(result: Result) -> str:
    """One line: processor, cores, load, date."""
    found = result["hardware"]
    kind = found["gpu"] or f"{found['cpu']}, {found['cores']} cores"
    load = f"load {found['load_average']:.1f} at the start"
    return f"{kind}, {found['system']}, {load}, {result['date']}, {result['seconds'] / 60:.0f} minutes"


def packages(result: Result) -> str:
    """One line: versions of ours and of the peers' environment."""
    named = dict(result["versions"]) | {
        name: version for name, version in result.get("peer_versions", {}).items() if name not in result["versions"]
    }
    return ", ".join(f"{name} {version}" for name, version in named.items())


def not_compared(result: Result) -> list[str]:
    """A line for each peer that could not be measured."""
    return [
        f"{benchmark}: {peer}: {reason}"
        for benchmark, reasons in result.get("not_compared", {}).items()
        for peer, reason in reasons.items()
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """The notes of rows: once if all are the same, otherwise by row."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            told.setdefault(row.note, []).append(row.name)
    if not told:
        return []
    if len(told) == 1:
        return [f"{next(iter(told))}.", ""]
    lines = []
    for note, names in told.items():
        different = list(dict.fromkeys(names))
        more = f" and {len(different) - 2} more" if len(different) > 2 else ""
        lines.append(f"- {'; '.join(different[:2])}{more}: {note}")
    return [*lines, ""]


def tables(result: Result) -> str:
    """One table a benchmark, each under its heading with its command and its seconds."""
    parts = []
    spent = result.get("benchmark_seconds", {})
    for name, rows in by_benchmark(rows_of(result)).items():
        parts += [f"## {name}", ""]
        if name in result["commands"]:
            took = f" ({spent[name]:.0f} s)" if name in spent else ""
            parts += [f"`{result['commands'][name]}`{took}", ""]
        parts += [table(rows), "", *notes(rows)]
    return "\n".join(parts)


def listing(title: str, lines: Sequence[str]) -> str:
    """A heading and a list, or nothing without lines."""
    return "\n".join([f"## {title}", "", *(f"- {line}" for line in lines), ""]) if lines else ""


def as_text(result: Result) -> str:
    """The whole result for the terminal."""
    failures = [f"{name}: {reason}" for name, reason in result["failures"].items()]
    parts = (
        f"{machine_kind(result['hardware'])}: {machine(result)}\n{packages(result)}\n",
        tables(result),
        listing("Not compared", not_compared(result)),
        listing("Targets missed", missed(rows_of(result))),
        listing("FAILED", failures),
    )
    return "\n".join(part for part in parts if part)
