"""Costs at the size of real runs, on one core: each row is one figure of ours and its target, without a peer.

A function per measurement returns its rows; `MEASUREMENTS` lists them. Each runs in a process of its own, so that its
memory is its own.

    OMP_NUM_THREADS=1 python benchmarks/real_size.py            # or make bench-real-size
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, hardware, number, say, versions
from benchmarks.real_size_checkpoint import checkpoint_costs, limited_disk_rates
from benchmarks.real_size_data import data_plane
from benchmarks.real_size_figure import Figure, NotMeasuredError
from benchmarks.real_size_micro_batch import micro_batch_inputs
from benchmarks.real_size_response import response_memory, response_time
from benchmarks.real_size_start import large_worlds, prompt_start, weights_of_a_node
from benchmarks.real_size_weights import weight_updates
from benchmarks.result_files import save

MEASUREMENTS: tuple[Callable[[bool], list[Figure]], ...] = (
    response_time, response_memory, micro_batch_inputs, data_plane, weight_updates, checkpoint_costs,
    limited_disk_rates, prompt_start, weights_of_a_node, large_worlds,
)  # fmt: skip
RESULT = ROOT / "build" / "real_size.json"
QUICK_SECONDS = 480.0  # that all measurements may take with --quick


@dataclass
class Result:
    """figures: of the measurements. missing: those that this machine cannot make, with the reason. seconds: of each."""

    figures: list[Figure] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def with_own_time(self) -> list[Figure]:
        """The figures, and the time of a quick run of all."""
        taken = {f"{name}, s": seconds for name, seconds in self.seconds.items()}
        own = Figure("this command with --quick", sum(self.seconds.values()), QUICK_SECONDS, "s", taken)
        return [*self.figures, own]


def measure(quick: bool, only: str = "") -> Result:
    """All measurements, or the one with this name, each in a process of its own."""
    result = Result()
    for function in MEASUREMENTS:
        if only not in ("", function.__name__):
            continue
        say(f"{function.__name__}: {(function.__doc__ or '').splitlines()[0]}")
        began = time.perf_counter()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                result.figures += pool.submit(function, quick).result()
            except NotMeasuredError as reason:
                result.missing[function.__name__] = str(reason)
                say(f"not measured: {reason}")
        result.seconds[function.__name__] = time.perf_counter() - began
        say(f"{function.__name__}: {result.seconds[function.__name__]:.0f} s")
    return result


def table(figures: list[Figure]) -> str:
    """Markdown."""
    lines = ["| what | ours | target | met |", "| --- | --- | --- | --- |"]
    lines += [f"| {f.what} | {number(f.ours)} {f.unit} | <= {f.target:g} | {'yes' if f.met else 'NO'} |"
              for f in figures]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats where it takes long")
    names = [function.__name__ for function in MEASUREMENTS]
    parser.add_argument("--only", default="", choices=names, help="this measurement alone")
    parser.add_argument("--json", type=Path, default=RESULT, help="where the rows are written (default: %(default)s)")
    args = parser.parse_args()
    machine = hardware()
    result = measure(args.quick, args.only)
    figures = result.with_own_time() if args.quick and not args.only else result.figures
    print(table(figures))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    save(args.json, {"date": datetime.date.today().isoformat(), "quick": args.quick, "hardware": machine,
                     "versions": versions(), "not_measured": result.missing, "seconds": result.seconds,
                     "rows": [figure.to_json() for figure in figures]})  # fmt: skip


if __name__ == "__main__":
    main()
