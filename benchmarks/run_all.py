"""Run every benchmark, print one table a benchmark and write the result.

Each benchmark runs in a process of its own. All take under 20 minutes on two quiet cores, with ``--quick`` about a
tenth; the peers' environment is made on the first run. A run with ``--quick`` or ``--only``, or one in which a
benchmark failed, writes ``partial.json`` and leaves ``latest.json`` alone: its rows always come from one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, ROOT, SCHEMA, Row, hardware, say, versions
from benchmarks.report import as_text
from benchmarks.result_files import read_latest, write_result

BENCHMARKS = ("loop_vs_trl", "step_vs_megatron", "log_probs", "scored_positions", "sequence_ratio",
              "policy_loss", "packing", "routing_replay", "weight_export", "checkpoint", "scaling")  # fmt: skip
WITH_PEERS = ("loop_vs_trl", "packing", "log_probs", "policy_loss")  # these take --peers-python
LIMIT = 900  # seconds a benchmark may take
BUSY = 0.5  # load average at the start above which figures suffer
FOLDER = ROOT / "benchmarks"


def command_of(file: Path, *, quick: bool, peers_python: str | None) -> list[str]:
    """Of one benchmark, relative to the repository."""
    command = ["python", f"benchmarks/{file.name}", *(["--quick"] if quick else [])]
    if peers_python and file.stem in WITH_PEERS:
        command += ["--peers-python", peers_python]
    return command


def run_benchmark(command: Sequence[str], file: Path, limit: float) -> dict[str, Any]:
    """Rows and details that a benchmark wrote to ``file``; it and all that it started end with this call.

    Raises ``RuntimeError`` where it fails or takes longer than ``limit`` seconds.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen([sys.executable, *command[1:], "--json", str(file)], cwd=ROOT, env=env,
                               stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {limit:.0f} s") from None
    finally:
        end_session(process)
    if code:
        raise RuntimeError(f"exit code {code}")
    return json.loads(file.read_text())


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process started with a session of its own, its children too, and reap it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def clock(seconds: float) -> str:
    """Minutes and seconds: 4:07."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def expected_seconds(names: Sequence[str], last: Mapping[str, float], *, quick: bool) -> dict[str, float]:
    """What each benchmark will take: as long as in the last whole run, else as long as the others' mean."""
    known = [last[name] for name in names if name in last]
    usual = sum(known) / len(known) if known else 100.0
    return {name: last.get(name, usual) * (0.15 if quick else 1.0) for name in names}


def seconds_of_last_run(folder: Path) -> dict[str, float]:
    """Duration of each benchmark in the newest whole run; empty without one."""
    try:
        return dict(read_latest(folder)["benchmark_seconds"])
    except (OSError, KeyError, ValueError):
        return {}


def named_reasons(found: Any) -> dict[str, str]:
    """``not_compared`` of a benchmark, a mapping of peers to reasons or a list of sentences."""
    if isinstance(found, Mapping):
        return {str(name): str(reason) for name, reason in found.items()}
    return {text.partition(": ")[0]: text.partition(": ")[2] for text in map(str, found)}


def checked_rows(records: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows of the benchmark ``name``, under its name. Raises ``ValueError`` for what isn't a row, for a figure that
    is not finite, or where two rows have the same key."""
    try:
        rows = [replace(Row.from_json(record), benchmark=name) for record in records]
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a row: {error}") from None
    for row in rows:
        if not all(math.isfinite(value) for spread in (row.ratio, row.ours, row.peer) for value in astuple(spread)):
            raise ValueError(f"{row.name}, against {row.peer_name}: a figure isn't finite")
    twice = [key for key, count in Counter(row.key for row in rows).items() if count > 1]
    if twice:
        raise ValueError(f"two rows are called {twice[0][1]}, against {twice[0][2]}")
    return [row.to_json() for row in rows]


def run_one(file: Path, command: Sequence[str]) -> dict[str, Any]:
    """What ``run_benchmark`` gives, rows checked, with its ``seconds``; a failure is ``{"failure": reason}``."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if not file.is_file():
                raise RuntimeError(f"there is no {file.name}")
            found = run_benchmark(command, Path(scratch) / "result.json", LIMIT)
            found["rows"] = checked_rows(found["rows"], file.stem)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            say(f"FAILED {file.stem}: {error}")
            return {"failure": str(error).split("\n")[0] or type(error).__name__}
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def run_all(args: argparse.Namespace, folder: Path = FOLDER) -> dict[str, Any]:
    """The whole result; a failed benchmark is listed under ``failures`` and does not stop the others."""
    names = args.only or BENCHMARKS
    expected = expected_seconds(names, seconds_of_last_run(RESULTS), quick=args.quick)
    started, machine = time.perf_counter(), hardware()
    if machine["load_average"] > BUSY:
        say(f"WARNING: load {machine['load_average']:.1f} at the start: other programs run, figures will be worse")
    commands, found = {}, {}
    for number, name in enumerate(names, start=1):
        left = sum(expected[other] for other in names[number - 1 :])
        elapsed = time.perf_counter() - started
        say(f"== {name} ({number} of {len(names)}), {clock(elapsed)} elapsed, about {clock(left)} left")
        command = command_of(folder / f"{name}.py", quick=args.quick, peers_python=args.peers_python)
        shown = " ".join("PYTHON_WITH_PEERS" if part == args.peers_python else part for part in command)
        commands[name] = f"OMP_NUM_THREADS=1 {shown}"
        found[name] = run_one(folder / f"{name}.py", command)
    failures = {name: part["failure"] for name, part in found.items() if "failure" in part}
    done = {name: part for name, part in found.items() if name not in failures}
    rows = [row for part in done.values() for row in part["rows"]]
    return {
        "schema": SCHEMA, "date": datetime.date.today().isoformat(), "quick": args.quick,
        "partial": bool(args.quick or args.only or failures), "hardware": machine, "versions": versions(),
        "peer_versions": {k: v for part in done.values() for k, v in part.get("peer_versions", {}).items()},
        "seconds": round(time.perf_counter() - started, 1), "commands": commands,
        "benchmark_seconds": {name: part["seconds"] for name, part in done.items()},
        "not_compared": {name: named_reasons(part["not_compared"])
                         for name, part in done.items() if part.get("not_compared")},
        "failures": failures, "rows": rows,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, small sizes; not for figures to quote")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="run these only")
    parser.add_argument("--peers-python", help="interpreter with the peers (default: .venv-peers is made)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the benchmark that runs ends too
    result = run_all(args)
    print(as_text(result))
    print(write_result(result, args.results))
    if result["partial"]:
        print("part of the benchmarks, small sizes or a failure: latest.json stays as it is")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
