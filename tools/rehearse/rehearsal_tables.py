"""The tables of a rehearsal as rows of text, the first being the heading; of the printed report and of the page."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.errors import show_bytes
from megatron_gspo.tools.plan.hardware import GIB
from megatron_gspo.tools.rehearse.records import KINDS, RankRecord
from megatron_gspo.tools.rehearse.roles import ranges
from megatron_gspo.tools.rehearse.summary import by_count, collective_totals

Rows = list[list[str]]
STATES = ("weights", "gradients", "optimizer")


def overview(records: Sequence[RankRecord]) -> Rows:
    """One row a rank; GiB."""
    rows = [["rank", "role", "stands for", *STATES, "activations", "peak, GiB", "peak in", "collectives", "host syncs",
             "seconds"]]  # fmt: skip
    for record in records:
        memory = record.memory
        rows.append([
            str(record.rank), ", ".join(record.roles), ranges(record.stands_for),
            *(gib(memory.states.get(kind, 0)) for kind in STATES),
            gib(memory.peak_activations.bytes.get("activations", 0)), gib(memory.peak.total), memory.peak.phase,
            f"{len(record.collectives):,}", f"{sum(sync.count for sync in record.host_syncs):,}",
            f"{sum(record.seconds.values()):.0f}",
        ])  # fmt: skip
    return rows


def role_tables(record: RankRecord) -> list[Rows]:
    """What one rank does, without its number; tables without rows are left out."""
    tables = (memory_rows(record), collective_rows(record), sync_rows(record), copy_rows(record), flop_rows(record),
              retained_rows(record))  # fmt: skip
    return [rows for rows in tables if len(rows) > 1]


def micro_batches(record: RankRecord) -> str:
    """How much was run: what the tables count is of this."""
    tokens = sorted(set(record.micro_batches))
    sizes = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    return f"{len(record.micro_batches)} micro-batches of {sizes} tokens."


def same_roles(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """The ranks that do the same, together."""
    found: dict[str, list[RankRecord]] = {}
    for record in records:
        found.setdefault(repr((role_tables(record), micro_batches(record), record.notes)), []).append(record)
    return list(found.values())


def memory_rows(record: RankRecord) -> Rows:
    """GiB by kind at the peak of each phase, and the operation that reaches it."""
    kinds = [kind for kind in KINDS if any(point.bytes.get(kind) for point in record.memory.peaks.values())]
    rows = [["peak of", *kinds, "total, GiB", "operation", "at"]]
    for phase, point in record.memory.peaks.items():
        values = [gib(point.bytes.get(kind, 0)) for kind in kinds]
        rows.append([phase, *values, gib(point.total), point.op, innermost(point.where)])
    return rows


def collective_rows(record: RankRecord) -> Rows:
    """Calls by phase, group and operation; bytes of all together."""
    rows = [["collectives of", "group", "operation", "dtype", "calls", "bytes"]]
    for total in collective_totals(record.collectives):
        rows.append([total.phase, total.group, total.op, total.dtype, f"{total.count:,}", show_bytes(total.bytes)])
    return rows


def sync_rows(record: RankRecord) -> Rows:
    """Where the host waits for the GPU, the most frequent first."""
    rows = [["host syncs in", "count", "by", "at"]]
    rows += [[one.phase, f"{one.count:,}", one.kind, innermost(one.where)] for one in by_count(record.host_syncs)]
    return rows


def copy_rows(record: RankRecord) -> Rows:
    """Copies from host to device, the most frequent first."""
    rows = [["copies to the device in", "count", "bytes", "blocking", "at"]]
    for copy in by_count(record.host_copies):
        blocks = "yes" if copy.blocking else "no"
        rows.append([copy.phase, f"{copy.count:,}", show_bytes(copy.bytes), blocks, innermost(copy.where)])
    return rows


def flop_rows(record: RankRecord) -> Rows:
    """Floating-point operations of products and attention, by phase."""
    rows = [["TFLOP of", "operation", "TFLOP"]]
    for phase, operations in record.flops.items():
        largest_first = sorted(operations.items(), key=lambda item: -item[1])
        rows += [[phase, name, f"{count / 1e12:.3f}"] for name, count in largest_first if count]
    return rows


def retained_rows(record: RankRecord) -> Rows:
    """Tensors of the step that are alive after it, the largest first."""
    rows = [["retained", "shape", "dtype", "held by", "allocated at"]]
    for one in sorted(record.retained, key=lambda one: -one.bytes):
        shape = "x".join(map(str, one.shape))
        rows.append([show_bytes(one.bytes), shape, one.dtype, one.owner, innermost(one.where_allocated)])
    return rows


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def innermost(where: Sequence[str]) -> str:
    """The innermost call site."""
    return where[0] if where else ""
