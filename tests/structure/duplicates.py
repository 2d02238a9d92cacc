"""Blocks of equal code: a run of at least six equal lines in two places.

Lines are compared without their indentation. Blank lines, comments, docstrings and imports are left out, and so are
lines that hold brackets only.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

from tests.structure.source_tree import Module

MINIMUM = 6


@dataclass(frozen=True)
class Duplicate:
    """Two equal blocks. lines: how many lines of code they share."""

    first: str
    second: str
    lines: int


def find_duplicates(modules: list[Module], minimum: int = MINIMUM) -> list[Duplicate]:
    """Each pair of equal blocks once, at its greatest length."""
    texts = {module.path: _normalised(module) for module in modules}
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, lines in texts.items():
        for start in range(len(lines) - minimum + 1):
            windows[tuple(text for _, text in lines[start : start + minimum])].append((path, start))
    found = []
    for places in windows.values():
        for (path, start), (other, begin) in combinations(places, 2):
            mine, theirs = texts[path], texts[other]
            if start and begin and mine[start - 1][1] == theirs[begin - 1][1]:
                continue  # inside a longer block, which is reported from its beginning
            size = 0
            while (
                start + size < len(mine)
                and begin + size < len(theirs)
                and mine[start + size][1] == theirs[begin + size][1]
                and (path != other or start + size < begin)
            ):
                size += 1
            if size >= minimum:
                found.append(Duplicate(f"{path}:{mine[start][0]}", f"{other}:{theirs[begin][0]}", size))
    return sorted(found, key=lambda d: (-d.lines, d.first, d.second))


def _normalised(module: Module) -> list[tuple[int, str]]:
    """(line number, text) of the lines that count."""
    imported = {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = module.source.splitlines()
    numbered = [(number, " ".join(lines[number - 1].split())) for number in module.code_lines if number not in imported]
    return [(number, text) for number, text in numbered if text.strip("()[]{},: ")]
