"""Run the benchmarks, print one table and keep the result.

    make bench                                   # or: python benchmarks/run_all.py [--quick] [--trl-python PATH]

Writes ``benchmarks/results/latest.json`` and a copy named after the day and the machine: rows, versions, hardware and
the commands. The loop's benchmark needs an environment with TRL, which is made as ``.venv-trl`` unless one is named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import RESULTS, SCHEMA, Row, hardware, say, table, versions, write_result  # noqa: E402

SCRIPTS = ("step_vs_megatron", "loop_vs_trl")


def run_script(name: str, options: list[str], folder: Path) -> dict[str, Any]:
    """One benchmark in a process of its own; what it saved, and the command. A failure ends the suite."""
    file = folder / f"{name}.json"
    command = ["benchmarks/" + name + ".py", *options]
    say("$ python", *command)
    subprocess.run([sys.executable, *command, "--json", str(file)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return {**json.loads(file.read_text()), "command": "python " + " ".join(command)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    args = parser.parse_args()
    quick = ["--quick"] if args.quick else []
    trl = ["--trl-python", args.trl_python] if args.trl_python else []
    machine = hardware()
    with tempfile.TemporaryDirectory() as folder:
        parts = {name: run_script(name, quick + (trl if "trl" in name else []), Path(folder)) for name in SCRIPTS}
    rows = [Row.from_json(row) for part in parts.values() for row in part["rows"]]
    print(table(rows))
    day = datetime.date.today().isoformat()
    result = {
        "schema": SCHEMA,
        "date": day,
        "hardware": machine,
        "versions": versions() | parts["loop_vs_trl"].get("peer_versions", {}),
        "commands": {name: part["command"].replace(str(args.trl_python), "TRL_PYTHON") for name, part in parts.items()},
        "rows": [row.to_json() for row in rows],
    }
    for file in write_result(result, RESULTS, day):
        say("wrote", file.relative_to(ROOT))


if __name__ == "__main__":
    main()
