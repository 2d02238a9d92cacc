"""Shared by all benchmarks: interleaved timing, medians, rows, tables.

A *row* compares ours with one peer. Both ran in turns in the same run; a ratio is taken within each
turn and the median of these ratios is what the table shows, so that a machine that gets slower or
faster has little effect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "megatron-core", "transformers")


@dataclass(frozen=True)
class Seconds:
    """One measurement: wall-clock time, and this process's own CPU time, which counts no other
    program's turns.
    """

    wall: float
    cpu: float


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of ``count`` measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ``ValueError`` without values."""
        if not values:
            raise ValueError("no measurements: repeat at least once")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    @classmethod
    def exactly(cls, value: float) -> Spread:
        """Of a count, which does not vary."""
        return cls(value, value, value, 1)


@dataclass(frozen=True)
class Row:
    """Ours against one peer. ``ratio`` and ``cpu_ratio`` are ours / peer; ``better`` is the better
    direction. ``cpu_ratio`` is None where CPU time means nothing (memory, GPU).
    """

    benchmark: str
    name: str
    peer_name: str
    unit: str
    better: str  # "higher" or "lower"
    ratio: Spread
    ours: Spread
    peer: Spread
    cpu_ratio: Spread | None = None
    note: str = ""


def say(*parts: object) -> None:
    """Progress, on standard error: standard output is for the table."""
    print(*parts, file=sys.stderr, flush=True)


def timed(function: Callable[[], Any]) -> Seconds:
    """Run once; the caller synchronises with a GPU."""
    wall = time.perf_counter()
    cpu = time.process_time()
    function()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def interleave(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warmup: int = 2,
    seconds: float = 120.0,
) -> dict[str, list[Seconds]]:
    """Time every contestant ``by_turns``, after ``warmup`` calls of each."""
    for _ in range(warmup):
        for function in contestants.values():
            function()
    measures = {name: partial(timed, function) for name, function in contestants.items()}
    return by_turns(measures, repeats=repeats, seconds=seconds)


def by_turns(
    measures: Mapping[K, Callable[[], T]],
    *,
    repeats: int,
    seconds: float,
    agree: Callable[[bool], bool] = bool,
) -> dict[K, list[T]]:
    """What each of ``measures`` gives once a turn, ``repeats`` turns or as many as fit in
    ``seconds`` (three at least).

    The order alternates between turns, so that none always runs after the same other one. ``agree``
    makes whether time is up the same on all ranks that run the turns together; it is called before
    every turn.
    """
    taken: dict[K, list[T]] = {name: [] for name in measures}
    started = time.perf_counter()
    for turn in range(repeats):
        if agree(turn >= 3 and time.perf_counter() - started > seconds):
            break
        names = list(measures)
        for name in names if turn % 2 == 0 else reversed(names):
            taken[name].append(measures[name]())
    return taken


def ratios(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """Of ours / peer, turn by turn."""
    return Spread.of([a / b for a, b in zip(ours, peer, strict=True)])


def time_row(
    benchmark: str, name: str, ours: Sequence[Seconds], peer: Sequence[Seconds], **more: Any
) -> Row:
    """A row of times in milliseconds (lower is better) from the turns of two contestants."""
    wall = [[1e3 * turn.wall for turn in turns] for turns in (ours, peer)]
    cpu = [[turn.cpu for turn in turns] for turns in (ours, peer)]
    return Row(
        benchmark,
        name,
        unit="ms",
        better="lower",
        ratio=ratios(*wall),
        cpu_ratio=ratios(*cpu),
        ours=Spread.of(wall[0]),
        peer=Spread.of(wall[1]),
        **more,
    )


def rate_row(
    benchmark: str,
    name: str,
    ours: Sequence[Mapping[str, float]],
    peer: Sequence[Mapping[str, float]],
    **more: Any,
) -> Row:
    """A row of rates (higher is better); every turn has ``amount``, ``seconds`` and
    ``cpu_seconds``.
    """
    wall = [[turn["amount"] / turn["seconds"] for turn in turns] for turns in (ours, peer)]
    cpu = [[turn["amount"] / turn["cpu_seconds"] for turn in turns] for turns in (ours, peer)]
    return Row(
        benchmark,
        name,
        better="higher",
        ratio=ratios(*wall),
        cpu_ratio=ratios(*cpu),
        ours=Spread.of(wall[0]),
        peer=Spread.of(wall[1]),
        **more,
    )


def count_row(
    benchmark: str, name: str, ours: float, peer: float, *, unit: str, **more: Any
) -> Row:
    """A row of two counts that don't vary (lower is better); ``peer`` is above zero."""
    our_spread, peer_spread, ratio = (Spread.exactly(value) for value in (ours, peer, ours / peer))
    return Row(
        benchmark,
        name,
        unit=unit,
        better="lower",
        ratio=ratio,
        ours=our_spread,
        peer=peer_spread,
        **more,
    )


def number(value: float) -> str:
    """Three significant digits, thousands separated: 12,400; 3.14; 0.0021."""
    if abs(value) < 999.5:
        return f"{value:.3g}"
    step = 10 ** (len(str(round(abs(value)))) - 3)
    return f"{round(value / step) * step:,}"


def _ratio(value: float) -> str:
    """Two decimals, below 0.1 two digits."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def ratio_text(ratio: Spread) -> str:
    """Median and quartiles: ``1.02 (0.94-1.02)``."""
    return f"{_ratio(ratio.median)} ({_ratio(ratio.low)}-{_ratio(ratio.high)})"


def _cells(row: Row) -> list[str]:
    return [
        ratio_text(row.ratio),
        "" if row.cpu_ratio is None else _ratio(row.cpu_ratio.median),
        row.name,
        f"{number(row.ours.median)} {row.unit}",
        f"{number(row.peer.median)} {row.unit}",
        row.peer_name,
    ]


HEADINGS = ("ours / peer", "CPU time", "what", "ours", "peer", "peer is")


def table(rows: Sequence[Row]) -> str:
    """Markdown: the ratio with its quartiles first, then the ratio from CPU time, and
    both medians.
    """
    lines = [list(HEADINGS), *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    text = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    return "\n".join(
        [text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]]
    )


def cpu_model() -> str:
    """The processor's name from /proc/cpuinfo."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, load average before the run and GPU (None without
    one).
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "load_average": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }


def machine_kind(machine: Mapping[str, Any]) -> str:
    """A name for files: the GPU, else processor and cores, e.g. ``amd-epyc-2-cores``."""
    text = machine["gpu"] or f"{machine['cpu']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def versions() -> dict[str, str]:
    """Of Python and of the packages that both sides of a benchmark share."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }


def versions_in(python: str, names: Sequence[str]) -> dict[str, str]:
    """Of packages in another interpreter's environment.

    Raises ``CalledProcessError`` where one is absent.
    """
    code = (
        "import json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in"
        f" {tuple(names)!r}}}))"
    )
    return json.loads(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    )


def save_rows(file: Path, rows: Sequence[Row], **more: Any) -> None:
    """One benchmark's part of a result, for ``run_all.py``."""
    file.write_text(json.dumps({"rows": [asdict(row) for row in rows], **more}) + "\n")


Measured = list[Row] | tuple[list[Row], dict[str, Any]]


def run_from_command_line(
    about: str | None,
    measure: Callable[[argparse.Namespace], Measured],
    numbers: Mapping[str, int],
    *,
    seconds: float,
) -> None:
    """The command line of a benchmark: ``--quick``, ``--seconds``, ``--json`` and a key for each of
    ``numbers`` with its default, ``repeats`` among them. Prints the table of ``measure``'s rows
    and, if requested, writes them with the details that ``measure`` returns."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="10 repeats at most, small sizes; to see that it runs"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="stop repeating after so long (default: %(default)s)",
    )
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    args.repeats = min(args.repeats, 10) if args.quick else args.repeats
    measured = measure(args)
    rows, details = measured if isinstance(measured, tuple) else (measured, {})
    print(table(rows))
    if args.json:
        save_rows(args.json, rows, **details)
