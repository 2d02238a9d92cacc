"""Write docs/mutation.md from the results of run.py and the reasons in survivors.toml.

    python tests/mutation/report.py [--out build/mutation] [--page docs/mutation.md]

The page is written where every file was measured to its end. Ends with 1 where a survivor has no reason, or, in the
whole result, a reason has no survivor or too few mutants were killed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from tests.mutation.run import PACKAGES, load, modules  # noqa: E402

WANTED = 0.95  # of all mutants, killed


def counted(mutants: list[dict]) -> Counter[str]:
    """Number of mutants by column; a crash of the test process goes under `crashed`."""
    return Counter(m["status"].split(" with ")[0] for m in mutants)


def share(counts: Counter[str]) -> float:
    """Share of killed mutants; timeouts and crashes count."""
    return sum(counts[name] for name in ("killed", "timeout", "crashed")) / max(counts.total(), 1)


def unmeasured(results: dict[str, list[dict]]) -> list[str]:
    """Files without results, or with some only: there the killed come first, which would bias the share."""
    return [file for file in modules() if file not in results or counted(results[file])["not run"]]


def table(results: dict[str, list[dict]]) -> list[str]:
    """One row per package and per file with survivors. Timeouts and crashes count as killed."""
    lines = ["| file | mutants | survived | killed, % |", "| --- | --- | --- | --- |"]
    surviving = {file: mutants for file, mutants in results.items() if share(counted(mutants)) < 1}
    groups = {file.removeprefix("megatron_gspo/"): mutants for file, mutants in surviving.items()}
    for package in PACKAGES:
        name = f"**{package.removeprefix('megatron_gspo/')}**"
        groups[name] = [m for file, ms in results.items() if file.startswith(package) for m in ms]
    groups["**all**"] = [m for ms in results.values() for m in ms]
    for name, mutants in groups.items():
        counts = counted(mutants)
        percent = "unfinished" if counts["not run"] else f"{100 * share(counts):.1f}"
        lines.append(f"| {name} | {len(mutants)} | {counts['survived']} | {percent} |")
    return lines


def survivors(results: dict[str, list[dict]], reasons: list[dict]) -> tuple[list[str], list[str], list[str]]:
    """One line a reason with the number of survivors and their modules; survivors without a reason; and keys of reasons
    that are not among the survivors."""
    alive = {m["key"]: m for ms in results.values() for m in ms if m["status"] == "survived"}
    lines, stale = [], []
    for reason in reasons:
        found = [alive.pop(key) for key in reason["keys"] if key in alive]
        known = {m["key"] for m in found}
        stale += [key for key in reason["keys"] if key not in known]
        if found:
            files = ", ".join(sorted({Path(m["file"]).stem for m in found}))
            lines.append(f"- {reason['text'].strip()} ({len(found)}: {files})")
    unexplained = [shown(m) for m in alive.values()]
    return lines + (["", "Without a reason:", "", *unexplained] if alive else []), unexplained, stale


def shown(mutant: dict) -> str:
    before, after = (" ".join(mutant[name].split()).replace("`", "'") for name in ("before", "after"))
    place = f"{mutant['file'].removeprefix('megatron_gspo/')}:{mutant['line']}"
    return f"- {place} `{mutant['key']}`: `{before}` → `{after or '(nothing)'}`"


def versions() -> str:
    names = ("mutmut", "torch", "pytest", "hypothesis")
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"{date.today()}, Python {platform.python_version()}, {found}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "mutation.md")
    options = parser.parse_args()
    loaded = load(options.out / "results.jsonl")
    results = {
        file: sorted(found.values(), key=lambda m: m["line"]) for file, found in sorted(loaded.items())
    }
    reasons = tomllib.loads((HERE / "survivors.toml").read_text())["reason"]
    lines, unexplained, stale = survivors(results, reasons)
    faults = [f"no reason in survivors.toml: {line.removeprefix('- ')}" for line in unexplained]
    counts = counted([m for mutants in results.values() for m in mutants])
    if missing := unmeasured(results):
        print(f"{options.page.name} is not written, {len(missing)} files are not measured: run.py --only 'not run'")
    else:
        faults += [f"{key} has a reason in survivors.toml and does not survive" for key in stale]
        if share(counts) < WANTED:
            faults.append(f"{100 * share(counts):.1f} % killed, wanted {100 * WANTED:.0f} %")
        text = (HERE / "page.md").read_text()
        text = text.replace("{table}", "\n".join(table(results))).replace("{survivors}", "\n".join(lines).strip())
        text = text.replace("{versions}", versions()).replace("{killed}", f"{100 * share(counts):.1f}")
        options.page.write_text(text.replace("{total}", str(counts.total())))
    print("\n".join([*table(results)[2:], *faults]))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
