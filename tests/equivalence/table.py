"""Measure every layout and write the page of the documentation:

    python -m tests.equivalence.table docs/equivalence.md [--models NAME ...]

runs what ``test_layouts.py`` runs under the installed megatron-core, keeps the errors as
``benchmarks/results/equivalence-<version>.json`` and writes the page from the results of all versions there.
"""

from __future__ import annotations

import argparse
import json
import platform
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
from tests.equivalence.page import render
from tests.equivalence.run import Errors
from tests.equivalence.tolerances import OF_LORA, TOLERANCES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def machine() -> str:
    """The processor's name and how many of its cores there are."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()


def measure(arrangements: dict[str, list[Arrangement]], console: Console) -> Iterator[dict[str, Any]]:
    """Launch them all; after each model the record so far, which becomes the result file."""
    started = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    defects: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        models = Models(Path(folder))
        task = progress.add_task("layouts", total=sum(map(len, arrangements.values())))
        for model, chosen in arrangements.items():
            found[model] = {}
            for arrangement in chosen:
                progress.update(task, description=f"{model} {arrangement.name}")
                case = case_for(model, arrangement)
                row = _row(case, worst_of(launch(models(model), case)))
                found[model][arrangement.name] = row
                figures = ", ".join(f"{kind} {error:.1e}" for kind, (error, _) in row["errors"].items())
                progress.console.print(f"{model} {arrangement.name}: {figures}", highlight=False)
                progress.advance(task)
            if model not in ADAPTERS:
                defects[model] = measure_defects(models(model)[0])
            yield {
                "versions": {name: version(name) for name in ("megatron-core", "torch", "transformers")},
                "python": platform.python_version(), "machine": machine(), "date": date.today().isoformat(),
                "seconds": round(time.monotonic() - started), "layouts": found, "defects": defects,
            }  # fmt: skip


def _row(case: Case, errors: Errors) -> dict[str, Any]:
    return {
        "processes": case.arrangement.world_size, **case.model,
        "one_by_one": next(scenario for scenario, cut in case.runs if cut == "one by one"),
        "distributed_optimizer": [("off", "on")[on] for on in case.distributed_optimizers],
        "errors": {kind: [float(f"{error:.3g}"), where] for kind, (error, where) in sorted(errors.worst.items())},
    }  # fmt: skip


def failures(record: dict[str, Any]) -> list[str]:
    """What is beyond its tolerance, one line each."""
    return [
        f"{model} {name}: {kind} is off by {error:.1e} ({where})"
        for model, rows in record["layouts"].items()
        for name, row in rows.items()
        for kind, (error, where) in row["errors"].items()
        if not error < (TOLERANCES | OF_LORA)[kind]
    ]


def joined(last: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The last record with the models of another in place of its own."""
    models = {key: last[key] | record[key] for key in ("layouts", "defects")}
    return last | models | {"seconds": last["seconds"] + record["seconds"]}


def load_records(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results of all versions of megatron-core, the oldest first."""
    records = [json.loads(path.read_text()) for path in folder.glob("equivalence-*.json")]
    return sorted(records, key=lambda r: [int(part) for part in r["versions"]["megatron-core"].split(".")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="where to write the page")
    parser.add_argument("--models", nargs="+", default=list(MEASURED), choices=list(MEASURED), metavar="NAME",
                        help="measure these only and keep the last results of the others")  # fmt: skip
    parser.add_argument("--render-only", action="store_true", help="measure nothing, use the results that are there")
    arguments = parser.parse_args()
    console = Console()
    wrong: list[str] = []
    if not arguments.render_only:
        file = RESULTS / f"equivalence-{version('megatron-core')}.json"
        last = json.loads(file.read_text()) if file.exists() else None
        for record in measure({name: MEASURED[name] for name in arguments.models}, console):
            wrong = failures(record)
            if last is not None and set(record["layouts"]) != set(MEASURED):
                record = joined(last, record)
            save(file, record)  # after each model: what an interrupted run has measured is kept
        console.print(f"wrote {file} after {record['seconds']} s")
    arguments.page.write_text(render(load_records()))
    console.print(f"wrote {arguments.page}")
    if wrong:
        raise SystemExit("beyond tolerance:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
