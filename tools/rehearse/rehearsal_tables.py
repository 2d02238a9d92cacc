"""The tables of a rehearsal as rows of text, the first being the heading; of the printed report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_gspo.errors import show_bytes
from megatron_gspo.gpus import GIB
from megatron_gspo.tools.rehearse.records import KINDS, RankRecord
from megatron_gspo.tools.rehearse.roles import ranges
from megatron_gspo.tools.rehearse.summary import collective_totals

Rows = list[list[str]]
STATES = ("weights", "gradients", "optimizer")
_ONCE = ("build", "weight_export", "checkpoint_plan")  # not in each optimizer step


def overview(records: Sequence[RankRecord]) -> Rows:
    """One row a rank; GiB."""
    rows = [
        [
            "rank",
            "role",
            "stands for",
            *STATES,
            "activations",
            "peak, GiB",
            "peak in",
            "collectives",
            "host syncs",
            "seconds",
        ]
    ]
    for record in records:
        memory = record.memory
        rows.append(
            [
                str(record.rank),
                short_roles(record.roles),
                ranges(record.stands_for),
                *(gib(memory.states.get(kind, 0)) for kind in STATES),
                gib(memory.peak_activations.bytes.get("activations", 0)),
                gib(memory.peak.total),
                memory.peak.phase,
                f"{len(record.collectives):,}",
                f"{sum(sync.count for sync in record.host_syncs):,}",
                f"{sum(record.seconds.values()):.0f}",
            ]
        )
    return rows


def short_roles(roles: Sequence[str]) -> str:
    """Roles with equal words joined: ``first stage; last tensor rank`` as ``first stage, last
    tensor``.
    """
    words: dict[str, list[str]] = {}
    for role in roles:
        end, _, name = role.partition(" ")
        words.setdefault(end, []).append(name.removesuffix(" rank"))
    return "; ".join(f"{end} {', '.join(names)}" for end, names in words.items())


def role_tables(record: RankRecord) -> list[Rows]:
    """What one rank does, without its number; tables without rows are left out."""
    tables = memory_rows(record), collective_rows(record), sync_rows(record)
    return [rows for rows in tables if len(rows) > 1]


def micro_batches(record: RankRecord) -> str:
    """How much was run: what the tables count is of this."""
    tokens = sorted(set(record.micro_batches))
    sizes = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    return f"{len(record.micro_batches)} micro-batches of {sizes} tokens."


def same_roles(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """The ranks that do the same, together."""
    records_of_role: dict[str, list[RankRecord]] = {}
    for record in records:
        records_of_role.setdefault(
            repr((role_tables(record), micro_batches(record), record.notes)), []
        ).append(record)
    return list(records_of_role.values())


def memory_rows(record: RankRecord) -> Rows:
    """GiB by kind at the peak of each phase, and the operation that reaches it."""
    kinds = [
        kind
        for kind in KINDS
        if any(point.bytes.get(kind) for point in record.memory.peaks.values())
    ]
    rows = [["peak of", *kinds, "total, GiB", "operation", "at"]]
    for phase, point in record.memory.peaks.items():
        values = [gib(point.bytes.get(kind, 0)) for kind in kinds]
        rows.append([phase, *values, gib(point.total), point.op, innermost(point.where)])
    return rows


def collective_rows(record: RankRecord) -> Rows:
    """Calls by phase, group and operation; bytes of all together."""
    rows = [["collectives of", "group", "operation", "dtype", "calls", "bytes"]]
    for total in collective_totals(record.collectives):
        rows.append(
            [
                total.phase,
                total.group,
                total.op,
                total.dtype,
                f"{total.count:,}",
                show_bytes(total.bytes),
            ]
        )
    return rows


def sync_rows(record: RankRecord) -> Rows:
    """Where the host waits for the GPU, of the step first, the most frequent first."""
    counts = Counter[tuple[str, str, str]]()
    for one in record.host_syncs:
        counts[one.phase, one.kind, innermost(one.where)] += one.count
    rows = [["host syncs in", "count", "by", "at"]]
    for (phase, kind, place), count in sorted(
        counts.items(), key=lambda item: (item[0][0] in _ONCE, -item[1])
    ):
        rows.append([phase, f"{count:,}", kind, place])
    return rows


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def innermost(where: Sequence[str]) -> str:
    """The innermost call site."""
    return where[0] if where else ""
