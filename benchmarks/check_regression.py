"""Compare a result with the committed one, row by row, as ratios of ours to the peer; exit code 1 after a regression.

    python benchmarks/run_all.py --results build/benchmarks && python benchmarks/check_regression.py --confirm 2

A row got *worse* where its ratio did by more than ``NOTICED`` and the quartiles of both results lie apart; by more than
``--loss`` it is a loss. Lost too: rows that are gone though their benchmark ran, benchmarks that failed, and targets
that were reached and are now missed by the better quartile as well. The ratio to a peer in the same run, and not the
time, is what survives another machine; a row of memory or bytes doesn't vary at all. With ``--confirm`` the benchmarks
that lost run again in turns with the old code (confirm_losses.py), and only what loses in each pair too is a loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, Row, Spread, machine_kind, number
from benchmarks.confirm_losses import OLD, checkout, in_turns, revision_of
from benchmarks.peers.environment import peers_python
from benchmarks.report import rows_of
from benchmarks.result_files import LATEST, latest_file

NOTICED = 0.05  # smaller changes are not reported
LOSS = 0.25  # a larger one fails: of 205 ratios of two runs one was 0.20 apart where code hadn't changed, none more
NEW = ROOT / "build" / "benchmarks"


Key = tuple[str, ...]  # of a row; of a benchmark that failed, its name alone
RunPair = Callable[[int, Sequence[str]], tuple[Mapping[str, Any], Mapping[str, Any]]]


@dataclass
class Findings:
    """What changed for the worse, in lines; ``losses``, by the row's key, make the check fail."""

    losses: dict[Key, str] = field(default_factory=dict)
    worse: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def worse_by(row: Row, old: Row) -> float:
    """How much worse the ratio is than it was, as a share: 0.1 where a time took 10 % more or a rate reached a tenth
    more before; negative where it is better."""
    pair = (row.ratio.median, old.ratio.median) if row.better == "lower" else (old.ratio.median, row.ratio.median)
    return 0.0 if pair[0] == pair[1] else pair[0] / pair[1] - 1.0 if pair[1] else float("inf")


def apart(row: Row, old: Row) -> bool:
    """Whether the quartiles of both ratios don't touch, the new ones on the worse side."""
    return row.ratio.low > old.ratio.high if row.better == "lower" else row.ratio.high < old.ratio.low


def surely_missed(row: Row) -> bool:
    """Whether the better quartile misses the target too."""
    spread: Spread = row.ours if row.absolute else row.ratio
    assert row.target is not None
    return spread.low > row.target if row.better == "lower" else spread.high < row.target


def compare_rows(row: Row, old: Row, loss: float, findings: Findings) -> None:
    """Adds the lines about one row."""
    name, change = describe(row), worse_by(row, old)
    if change > NOTICED and apart(row, old):
        ratio = f"{number(old.ratio.median)} -> {number(row.ratio.median)}"
        line = f"{name}: ours / peer {ratio}, {100 * change:.0f} % worse"
        if change > loss:
            findings.losses[row.key] = line
        else:
            findings.worse.append(line)
    if row.met is False and old.met is True and row.target == old.target:
        sign = ">=" if row.better == "higher" else "<="
        line = f"{name}: target {sign} {row.target:g} reached before ({number(old.found)}), now {number(row.found)}"
        if surely_missed(row):
            findings.losses[row.key] = line
        else:
            findings.worse.append(line)


def describe(row: Row) -> str:
    return f"{row.benchmark}: {row.name}, against {row.peer_name}"


def compare(new: Mapping[str, Any], old: Mapping[str, Any], *, loss: float = LOSS) -> Findings:
    """All that got worse from ``old`` to ``new``, two results of ``run_all.py``.

    Raises ``ValueError`` where one is a quick run and the other isn't: their sizes differ.
    """
    if new["quick"] != old["quick"]:
        raise ValueError("one of the results is of a --quick run, which has other sizes")
    findings = Findings()
    kinds = [machine_kind(result["hardware"]) for result in (new, old)]
    if kinds[0] != kinds[1]:
        findings.notes.append(f"another machine ({kinds[0]}, before {kinds[1]}): ratios may differ for that alone")
    findings.losses |= {(name,): f"{name} failed: {reason}" for name, reason in new["failures"].items()}
    rows = {row.key: row for row in rows_of(new)}
    ran = {row.benchmark for row in rows.values()}
    absent = []
    for before in rows_of(old):
        if before.key in rows:
            compare_rows(rows[before.key], before, loss, findings)
        elif before.benchmark in ran:
            findings.losses[before.key] = f"{describe(before)}: the row is gone"
        elif before.benchmark not in absent:
            absent.append(before.benchmark)
    findings.notes += [f"{name} did not run" for name in absent if name not in new["failures"]]
    return findings


def confirm(first: Findings, count: int, run_pair: RunPair, loss: float) -> Findings:
    """``first`` with those losses alone that each of ``count`` pairs has again; the others become notes.

    run_pair: (number of the pair, benchmarks) -> results of the new code and the old. A row that the old code lacks too
    isn't lost. A pair in which either benchmark failed clears none of its rows.
    """
    findings = Findings(dict(first.losses), list(first.worse), list(first.notes))
    for turn in range(count):
        names = sorted({key[0] for key in findings.losses})
        if not names:
            break
        new, old = run_pair(turn, names)
        again = compare(new, old, loss=loss).losses
        for key in list(findings.losses):
            if key in again:
                findings.losses[key] = again[key]
            elif key[0] not in {**new["failures"], **old["failures"]}:
                findings.notes.append(f"not lost beside the old code, in turns: {findings.losses.pop(key)}")
    return findings


def confirm_in_turns(first: Findings, count: int, loss: float, revision: str) -> Findings:
    """`confirm` with pairs of runs, the old code being ``revision``."""
    print(*first.losses.values(), sep="\n")
    print(f"lost against the committed result; these benchmarks run again, in turns with {revision[:12]}", flush=True)
    peers = peers_python()
    with checkout(revision, OLD) as old:
        roots = {"old": old, "new": ROOT}
        return confirm(first, count, partial(in_turns, roots, peers), loss)


def newest(folder: Path) -> Path:
    """The result that was written last. Raises ``FileNotFoundError`` where there is none."""
    files = [file for file in folder.glob("*.json") if file.name != LATEST]
    files.sort(key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{folder} holds no result; run benchmarks/run_all.py --results {folder}")
    return files[-1]


def show(findings: Findings, count: int) -> None:
    """The findings on standard output, losses last."""
    for title, lines in (("note", findings.notes), ("worse", findings.worse), ("LOST", findings.losses.values())):
        for line in lines:
            print(f"{title}: {line}")
    verdict = f"{len(findings.losses)} LOST, " if findings.losses else "nothing lost, "
    print(f"{verdict}{len(findings.worse)} worse, of {count} rows")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, nargs="?", help=f"(default: the newest file in {NEW.relative_to(ROOT)})")
    parser.add_argument("--against", type=Path, help="(default: the committed result)")
    parser.add_argument("--loss", type=float, default=LOSS, help="share that fails (default: %(default)s)")
    parser.add_argument("--confirm", type=int, default=0, metavar="PAIRS", help="run what lost again, old code and new")
    parser.add_argument("--revision", help="the old code (default: the commit of the committed result)")
    args = parser.parse_args()
    try:
        against = args.against or latest_file()
        new, old = (json.loads(file.read_text()) for file in (args.new or newest(NEW), against))
        findings = compare(new, old, loss=args.loss)
        if args.confirm and findings.losses:
            findings = confirm_in_turns(findings, args.confirm, args.loss, args.revision or revision_of(against))
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    show(findings, len(new["rows"]))
    return 1 if findings.losses else 0


if __name__ == "__main__":
    sys.exit(main())
