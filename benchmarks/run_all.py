"""Run every benchmark, each in a process of its own, and write one result.

All take about a quarter of an hour on two quiet cores, with ``--quick`` two minutes; the peers'
environment is made on the first run. A whole run writes ``results/<machine>.json``, any other
``build/benchmarks/partial.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, ROOT, hardware, machine_kind, say, versions
from benchmarks.result_files import save

BENCHMARKS = ("loop_vs_trl", "step_vs_megatron", "log_probs", "checkpoint")
WITH_PEERS = ("loop_vs_trl", "log_probs")  # these take --peers-python
LIMIT = 900  # seconds a benchmark may take
BUSY = 0.5  # load average at the start above which figures suffer


def command_of(name: str, *, quick: bool, peers_python: str | None) -> list[str]:
    """Of one benchmark, after the interpreter."""
    command = [f"benchmarks/{name}.py", *(["--quick"] if quick else [])]
    if peers_python and name in WITH_PEERS:
        command += ["--peers-python", peers_python]
    return command


def run_benchmark(command: list[str]) -> dict[str, Any]:
    """Run a benchmark, which prints its table; rows and details as it wrote them.

    Raises ``RuntimeError`` where it fails or takes longer than ``LIMIT`` seconds.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        try:
            done = subprocess.run(
                [sys.executable, *command, "--json", str(file)],
                cwd=ROOT,
                env=environment,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"took longer than {LIMIT:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}")
        return json.loads(file.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats, small sizes; not for figures to quote"
    )
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="run these only")
    parser.add_argument(
        "--peers-python", help="interpreter with the peers (default: .venv-peers is made)"
    )
    args = parser.parse_args()
    machine = hardware()
    if machine["load_average"] > BUSY:
        say(
            f"WARNING: load {machine['load_average']:.1f} at the start: other programs run, figures"
            " will be worse"
        )
    rows: list[dict[str, Any]] = []
    peer_versions: dict[str, str] = {}
    failures: dict[str, str] = {}
    for name in args.only or BENCHMARKS:
        say(f"== {name}")
        start = time.perf_counter()
        try:
            result = run_benchmark(
                command_of(name, quick=args.quick, peers_python=args.peers_python)
            )
        except RuntimeError as error:
            failures[name] = str(error)
            say(f"FAILED {name}: {error}")
            continue
        rows += result["rows"]
        peer_versions |= result.get("peer_versions", {})
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    is_whole = not (args.quick or args.only or failures)
    file = (
        RESULTS / f"{machine_kind(machine)}.json"
        if is_whole
        else ROOT / "build" / "benchmarks" / "partial.json"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    save(
        file,
        {
            "date": today,
            "hardware": machine,
            "versions": versions(),
            "peer_versions": peer_versions,
            "failures": failures,
            "rows": rows,
        },
    )
    print(f"{len(rows)} rows in {file}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
