"""Write docs/benchmarks.md and the tables of other pages from the result that ``results/latest.json`` names.

    python benchmarks/write_page.py            # all pages
    python benchmarks/write_page.py --check    # exit code 1 where a page isn't what the result says

A page shows rows of the committed result between two comments, with patterns of ``benchmark/name/peer`` apart by ``;``:

    <!-- benchmarks: loop_vs_trl/*; step_vs_megatron/* -->
    <!-- /benchmarks -->
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, machine_kind, table
from benchmarks.report import Result, listing, machine, missed, not_compared, packages, rows_of, select, tables
from benchmarks.result_files import read_latest

PAGE = Path("docs") / "benchmarks.md"
BLOCK = re.compile(r"^<!-- benchmarks: (.+) -->\n(?:.*\n)*?<!-- /benchmarks -->$", re.MULTILINE)
INTRODUCTION = """\
# Benchmarks

Written by `python benchmarks/write_page.py` from [benchmarks/results/NAME](../benchmarks/results/NAME),
which `make bench` writes; a test holds the two together. [benchmarks/README.md](../benchmarks/README.md) says what each
benchmark does and how to read its table: **ours / peer** first (median of the ratios within each turn, quartiles), from
the same run, in turns. *CPU time* is the same ratio from the processes' own CPU time.
"""


def page(result: Result) -> str:
    """docs/benchmarks.md."""
    count = sum(row.target is not None for row in rows_of(result))
    lines = missed(rows_of(result))
    parts = (
        INTRODUCTION.replace("NAME", f"{machine_kind(result['hardware'])}.json"),
        f"{machine(result)}.\n{packages(result)}.\n",
        f"Targets: {count - len(lines)} of {count} reached.\n",
        listing("Targets missed", lines),
        tables(result).rstrip() + "\n",
        listing("Not compared", not_compared(result)),
    )
    return "\n".join(part for part in parts if part)


def filled(text: str, result: Result) -> str:
    """A page's text with the rows that its blocks ask for. Raises ``ValueError`` for a pattern without a row."""

    def block(found: re.Match[str]) -> str:
        patterns = [pattern.strip() for pattern in found[1].split(";")]
        rows = select(rows_of(result), patterns)
        return f"<!-- benchmarks: {found[1]} -->\n\n{table(rows)}\n\n<!-- /benchmarks -->"

    return BLOCK.sub(block, text)


def pages(root: Path, result: Result) -> dict[Path, str]:
    """Every page that shows figures of the result, relative to ``root``, and what it should say.

    Raises ``ValueError``, with the page's name, where a page asks for a row that the result hasn't.
    """
    wanted = {PAGE: page(result)}
    for file in (root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = file.read_text(encoding="utf-8")
        if file != root / PAGE and BLOCK.search(text):
            try:
                wanted[file.relative_to(root)] = filled(text, result)
            except ValueError as error:
                raise ValueError(f"{file.relative_to(root)}: {error}") from None
    return wanted


def stale(root: Path, wanted: dict[Path, str]) -> list[Path]:
    """The pages that say something else."""
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
