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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, hardware, number, say, versions
from benchmarks.real_size_checkpoint import checkpoint_costs, limited_disk_rates
from benchmarks.real_size_data import data_plane
from benchmarks.real_size_figure import Figure, NotMeasuredError
from benchmarks.real_size_micro_batch import micro_batch_inputs
from benchmarks.real_size_response import response_memory, response_time
from benchmarks.real_size_start import large_worlds, prompt_start
from benchmarks.real_size_weights import weight_updates
from benchmarks.result_files import save

MEASUREMENTS: tuple[Callable[[bool], list[Figure]], ...] = (
    response_time, response_memory, micro_batch_inputs, data_plane, weight_updates, checkpoint_costs,
    limited_disk_rates, prompt_start, large_worlds,
)  # fmt: skip
RESULT = ROOT / "build" / "real_size.json"


def measure(quick: bool, only: str = "") -> tuple[list[Figure], dict[str, str]]:
    """The figures of all measurements, or of the one with this name, each in a process of its own; and those that this
    machine cannot make, with the reason."""
    figures, missing = [], {}
    for function in MEASUREMENTS:
        if only not in ("", function.__name__):
            continue
        say(f"{function.__name__}: {(function.__doc__ or '').splitlines()[0]}")
        began = time.perf_counter()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                figures += pool.submit(function, quick).result()
            except NotMeasuredError as reason:
                missing[function.__name__] = str(reason)
                say(f"not measured: {reason}")
        say(f"{function.__name__}: {time.perf_counter() - began:.0f} s")
    return figures, missing


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
    figures, missing = measure(args.quick, args.only)
    print(table(figures))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    save(args.json, {"date": datetime.date.today().isoformat(), "quick": args.quick, "hardware": machine,
                     "versions": versions(), "not_measured": missing,
                     "rows": [figure.to_json() for figure in figures]})  # fmt: skip


if __name__ == "__main__":
    main()
