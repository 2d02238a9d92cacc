"""Run every benchmark, print one table and write ``results/latest.json`` with a dated copy.

Each benchmark runs in a process of its own, on one thread. It takes about six minutes, with ``--quick`` two; TRL's
environment is made on the first run.
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

from benchmarks.common import RESULTS, ROOT, SCHEMA, Row, hardware, machine_kind, say, table, versions, write_result

BENCHMARKS = ("loop_vs_trl", "step_vs_megatron", "log_probs", "routing_replay")
LIMIT = 900  # seconds a benchmark may take, without the making of TRL's environment


def command_of(name: str, args: argparse.Namespace) -> list[str]:
    """Of one benchmark, relative to the repository."""
    command = ["python", f"benchmarks/{name}.py", *(["--quick"] if args.quick else [])]
    if name == "loop_vs_trl" and args.trl_python:
        command += ["--trl-python", args.trl_python]
    return command


def run_benchmark(name: str, args: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Its rows and details. Raises ``CalledProcessError`` or ``TimeoutExpired``."""
    command = [sys.executable, *command_of(name, args)[1:], "--json", str(file)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, check=True, cwd=ROOT, env=env, timeout=LIMIT, stdout=subprocess.DEVNULL)
    return json.loads(file.read_text())


def shown_command(name: str, args: argparse.Namespace) -> str:
    """The command for the result file; the place of an interpreter is nobody else's business."""
    text = " ".join(command_of(name, args))
    return f"OMP_NUM_THREADS=1 {text}".replace(args.trl_python or "\0", "PYTHON_WITH_TRL")


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """The whole result; a benchmark that fails is told under ``failures`` and leaves the others be."""
    started, machine = time.perf_counter(), hardware()
    rows: list[Row] = []
    result: dict[str, Any] = {"schema": SCHEMA, "date": datetime.date.today().isoformat(), "quick": args.quick,
                              "hardware": machine, "versions": versions(), "commands": {}, "failures": {}}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or BENCHMARKS:
            say(f"== {name}")
            result["commands"][name] = shown_command(name, args)
            try:
                found = run_benchmark(name, args, Path(folder) / f"{name}.json")
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                result["failures"][name] = f"{type(error).__name__}: {error}".split("\n")[0]
                continue
            rows += [Row.from_json(record) for record in found["rows"]]
            if "peer_versions" in found:
                result["versions"]["trl"] = found["peer_versions"]["trl"]
    return result | {"seconds": time.perf_counter() - started, "rows": [row.to_json() for row in rows]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, small sizes; not for figures to quote")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="run these only")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL; without it .venv-peers is made")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    result = run_all(args)
    print(f"{machine_kind(result['hardware'])}, load {result['hardware']['load_average']:.1f} at the start; "
          + ", ".join(f"{name} {version}" for name, version in result["versions"].items()))  # fmt: skip
    print(table([Row.from_json(record) for record in result["rows"]]))
    for file in write_result(result, args.results, result["date"]):
        print(file)
    for name, reason in result["failures"].items():
        print(f"FAILED {name}: {reason}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
