"""Measure every layout against float64, under the installed megatron-core:

    python -m tests.equivalence.proof [--models NAME ...]

runs what ``test_layouts.py`` runs, keeps every error as
``benchmarks/results/equivalence-<version>.json``, and prints the largest of each kind beside its
tolerance. The exit code is 1 if one is beyond it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.result_files import save
from tests.equivalence.cases import Case
from tests.equivalence.defects import measure_defects
from tests.equivalence.layouts import MEASURED, Arrangement
from tests.equivalence.lora import ADAPTERS
from tests.equivalence.measure import Models, case_for, launch, worst_of
from tests.equivalence.run import Errors
from tests.equivalence.tolerances import OF_LORA, TOLERANCES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Record = dict[str, Any]


def measure(arrangements: dict[str, list[Arrangement]], console: Console) -> Iterator[Record]:
    """Launch them all. Yields, after each model, the record so far, which becomes the result
    file.
    """
    started = time.monotonic()
    layouts: dict[str, Record] = {}
    defects: Record = {}
    total = sum(len(chosen) for chosen in arrangements.values())
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        models = Models(Path(folder))
        task = progress.add_task("layouts", total=total)
        for model, chosen in arrangements.items():
            layouts[model] = {}
            for arrangement in chosen:
                progress.update(task, description=f"{model} {arrangement.name}")
                case = case_for(model, arrangement)
                result = result_of(case, worst_of(launch(models(model), case)))
                layouts[model][arrangement.name] = result
                figures = [f"{name} {error:.1e}" for name, (error, _) in result["errors"].items()]
                progress.console.print(
                    f"{model} {arrangement.name}: {', '.join(figures)}", highlight=False
                )
                progress.advance(task)
            if model not in ADAPTERS:
                defects[model] = measure_defects(models(model).path)
            yield {
                "versions": {
                    name: version(name) for name in ("megatron-core", "torch", "transformers")
                },
                "python": platform.python_version(),
                "machine": machine(),
                "date": date.today().isoformat(),
                "seconds": round(time.monotonic() - started),
                "layouts": layouts,
                "defects": defects,
            }


def machine() -> str:
    """The processor's name and how many of its cores there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()


def result_of(case: Case, errors: Errors) -> Record:
    """What the result file has of one layout."""
    distributed_optimizer = ["on" if on else "off" for on in case.distributed_optimizers]
    return {
        "processes": case.arrangement.world_size,
        **case.model,
        "one_by_one": next(scenario for scenario, cut in case.runs if cut == "one by one"),
        "distributed_optimizer": distributed_optimizer,
        "errors": {
            name: [float(f"{error:.3g}"), where]
            for name, (error, where) in sorted(errors.worst.items())
        },
    }


def failures(record: Record) -> list[str]:
    """What is beyond its tolerance, one line each."""
    tolerances = TOLERANCES | OF_LORA
    return [
        f"{model} {name}: {error_name} is off by {error:.1e} ({where})"
        for model, results in record["layouts"].items()
        for name, result in results.items()
        for error_name, (error, where) in result["errors"].items()
        if not error < tolerances[error_name]
    ]


def summary(record: Record) -> str:
    """The largest error of each kind in all layouts, as a Markdown table."""
    lines = ["| error | largest | tolerance |", "| --- | --- | --- |"]
    for name, tolerance in (TOLERANCES | OF_LORA).items():
        errors = [
            result["errors"][name][0]
            for results in record["layouts"].values()
            for result in results.values()
            if name in result["errors"]
        ]
        if errors:
            lines.append(f"| {name} | {max(errors):.1e} | {tolerance:.0e} |")
    count = sum(len(results) for results in record["layouts"].values())
    return "\n".join([*lines, "", f"{count} layouts"])


def merged(previous: Record, record: Record) -> Record:
    """The previous results, with the models of `record` in place of their own."""
    return previous | {
        "layouts": previous["layouts"] | record["layouts"],
        "defects": previous["defects"] | record["defects"],
        "seconds": previous["seconds"] + record["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MEASURED),
        choices=list(MEASURED),
        metavar="NAME",
        help="measure these only and keep the previous results of the others",
    )
    arguments = parser.parse_args()
    console = Console()
    file = RESULTS / f"equivalence-{version('megatron-core')}.json"
    previous = json.loads(file.read_text()) if file.exists() else None
    beyond: list[str] = []
    for record in measure({name: MEASURED[name] for name in arguments.models}, console):
        beyond = failures(record)
        if previous is not None and set(record["layouts"]) != set(MEASURED):
            record = merged(previous, record)
        save(file, record)  # after each model: what an interrupted run has measured is kept
    console.print(summary(record), f"wrote {file}", *beyond, sep="\n", highlight=False)
    sys.exit(1 if beyond else 0)


if __name__ == "__main__":
    main()
