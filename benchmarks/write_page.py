"""Write docs/benchmarks.md and the tables of other pages from the result that ``results/latest.json`` names.

    python benchmarks/write_page.py            # all pages
    python benchmarks/write_page.py --check    # exit code 1 if a page differs from the result

A page shows rows of the committed result between two comments, with patterns of ``benchmark/name/peer`` apart by ``;``:

    <!-- benchmarks: loop_vs_trl/*; step_vs_megatron/* -->
    <!-- /benchmarks -->

`real_size_page.py` has the tables of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import real_size_page
from benchmarks.common import ROOT, Row, machine_kind, markdown, number, ratio_text
from benchmarks.report import Result, by_benchmark, listing, machine, missed, packages, rows_of, select
from benchmarks.result_files import read_latest

PAGE = Path("docs") / "benchmarks.md"
BLOCK = re.compile(r"^<!-- benchmarks: (.+) -->\n(?:.*\n)*?<!-- /benchmarks -->$", re.MULTILINE)
INTRODUCTION = """\
# Benchmarks

For readers who compare speed: how do time and memory compare with other libraries, and which targets are missed?

`make bench` measures; `python benchmarks/write_page.py` writes this page from
[benchmarks/results/NAME](../benchmarks/results/NAME), which has all rows and the peers that were not compared.
[benchmarks/README.md](../benchmarks/README.md) describes each benchmark. **ours / peer** is the median (quartiles) of
the ratios within each turn; both run interleaved. Higher is better for rates, lower for everything else.
"""
SHOWN = (  # rows of the page that the README does not have, as patterns of benchmark/name/peer
    "step_vs_megatron/*short*", "log_probs/log-prob + entropy, gradient, 1k x 152k, TP 4: *",
    "sequence_ratio/*64 sequences, CP 4: time/all-reduce*", "policy_loss/*long responses*", "policy_loss/*1024k*",
    "packing/padding, bimodal, 4096 on dp 64*/sorted, padded", "packing/*bimodal, 4096 on dp 64*/verl",
    "weight_export/*stream*/clone*", "checkpoint/wait*/a training step", "checkpoint/*/dist_checkpointing*",
    "scaling/step,*8 processes*",
)  # fmt: skip
HEADINGS = ("what", "peer", "ours / peer", "ours", "target")


def page(result: Result) -> str:
    """docs/benchmarks.md."""
    rows = rows_of(result)
    count = sum(row.target is not None for row in rows)
    lines = missed(rows)
    parts = (
        INTRODUCTION.replace("NAME", f"{machine_kind(result['hardware'])}.json"),
        f"{machine(result)}.\n{packages(result)}.\n",
        f"Targets: {count - len(lines)} of {count} reached.\n",
        listing("Targets missed", lines),
        summary(result, rows),
        "## Selected rows\n\nMore are in the [README](../README.md#speed).\n\n" + compact_table(_shown(rows)) + "\n",
    )
    return "\n".join(part for part in parts if part)


def _shown(rows: list[Row]) -> list[Row]:
    return [row for row in rows if any(fnmatchcase("/".join(row.key), pattern) for pattern in SHOWN)]


def summary(result: Result, rows: list[Row]) -> str:
    """Each benchmark with its command, rows and targets."""
    cells = []
    for name, found in by_benchmark(rows).items():
        targets = [row.met for row in found if row.target is not None]
        command = f"`{result['commands'][name]}`" if name in result["commands"] else ""
        cells.append([name, command, str(len(found)), f"{sum(map(bool, targets))} of {len(targets)}"])
    return "## All benchmarks\n\n" + markdown(("benchmark", "command", "rows", "targets"), cells) + "\n"


def compact_table(rows: list[Row]) -> str:
    """Rows as Markdown: the ratio with its quartiles, our median and the target."""
    return markdown(HEADINGS, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    sign = ("ours " if row.absolute else "") + (">=" if row.better == "higher" else "<=")
    target = "" if row.target is None else f"{sign} {row.target:g}: {'yes' if row.met else 'NO'}"
    return [row.name, row.peer_name, ratio_text(row.ratio), f"{number(row.ours.median)} {row.unit}", target]


def filled(text: str, result: Result) -> str:
    """A page's text with the rows that its blocks name. Raises ``ValueError`` for a pattern without a row."""

    def block(found: re.Match[str]) -> str:
        patterns = [pattern.strip() for pattern in found[1].split(";")]
        rows = select(rows_of(result), patterns)
        return f"<!-- benchmarks: {found[1]} -->\n\n{compact_table(rows)}\n\n<!-- /benchmarks -->"

    return BLOCK.sub(block, text)


def pages(root: Path, result: Result) -> dict[Path, str]:
    """Every page that shows figures of the result, relative to ``root``, and its text.

    Raises ``ValueError``, with the page's name, if a page requests a row that the result does not have.
    """
    wanted = {PAGE: page(result)}
    for file in (root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = file.read_text(encoding="utf-8")
        if file != root / PAGE and BLOCK.search(text):
            try:
                wanted[file.relative_to(root)] = filled(text, result)
            except ValueError as error:
                raise ValueError(f"{file.relative_to(root)}: {error}") from None
        elif real_size_page.BLOCK.search(text):
            wanted[file.relative_to(root)] = real_size_page.filled(text)
    return wanted


def stale(root: Path, wanted: dict[Path, str]) -> list[Path]:
    """The pages whose text differs."""
    return [name for name, text in wanted.items()
            if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that differ")
    args = parser.parse_args()
    try:
        wanted = pages(ROOT, read_latest())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    changed = stale(ROOT, wanted)
    for name in changed:
        if not args.check:
            (ROOT / name).write_text(wanted[name], encoding="utf-8")
        print(f"{name} {'differs from the result' if args.check else 'written'}")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
