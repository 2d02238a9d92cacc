"""Programs: the code of a response, and what runs it as its data set's harness does."""

from __future__ import annotations

import re
from dataclasses import dataclass

CPP_COMPILER = "/usr/bin/g++"
CPP_OPTIONS = "-O2 -std=c++17"

_LABELS = {
    "python": re.compile(r"python[0-9.]*|py[0-9.]*|pypy[0-9.]*|[\w-]+\.py"),
    "cpp": re.compile(r"(?:cpp|c\+\+|cc|cxx|g\+\+)[0-9a-z]*|[\w-]+\.(?:cpp|cc|cxx)"),
}
# What programs and functions have, and samples of input and output do not.
_PROGRAM_LINES = {
    "python": re.compile(
        r"^\s*(?:def|class|for|while|if|with|try|async)\b.*:\s*(?:#.*)?$"
        r"|^\s*(?:import|from)\s+\w|\b(?:print|write)\s*\(",
        re.MULTILINE,
    ),
    "cpp": re.compile(r"^\s*#\s*include\b|\bmain\s*\(", re.MULTILINE),
}
# A fence of CommonMark, at any indentation, also right after the mark of an item of a list. Its
# label has no backtick.
_FENCE = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class _Block:
    """A complete fenced block."""

    label: str
    """The first word after the fence, in lower case; "" for none."""

    code: str


def extract_code(response: str, language: str) -> str | None:
    """The program of a response; None if it has fences and no program in them.

    It is the last complete fenced block that is labelled with the language. If there is none, it is
    the last one without a label that looks like a program, or else the last one without a label.
    Without any fence it is the whole response. What follows the end of a thought counts alone, if
    it has such a block.
    """
    for text in dict.fromkeys((response.rpartition(_END_OF_THOUGHT)[2], response)):
        blocks = [block for block in _blocks(text, language) if block.code.strip()]
        labelled = [block.code for block in blocks if _LABELS[language].fullmatch(block.label)]
        plain = [block.code for block in blocks if not block.label]
        programs = [code for code in plain if _PROGRAM_LINES[language].search(code)]
        for candidates in (labelled, programs, plain):
            if candidates:
                return candidates[-1]
    return None if "```" in response or "~~~" in response else response


def _blocks(text: str, language: str) -> list[_Block]:
    """The complete fenced blocks.

    A fence with another label ends a block like one without, but one with the language's label
    begins the next.
    """
    blocks: list[_Block] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if fence is None:
            lines.append(line)
        elif opening is None or (
            fence["fence"][0] == opening["fence"][0]
            and _LABELS[language].fullmatch(_label(fence)) is not None
        ):
            opening = fence
            lines = []
        elif fence["fence"].startswith(opening["fence"]):
            blocks.append(_Block(_label(opening), _without_margin(lines)))
            opening = None
        else:
            lines.append(line)
    return blocks


def _label(match: re.Match[str]) -> str:
    """The language of a block's head: python for `python`, `Python 3`, `{.python}`,
    `python:main.py` and `python title="x"`."""
    word = re.match(r"[{.\s]*([\w+#.-]*)", match["info"])
    return word[1].lower() if word is not None else ""


def _without_margin(lines: list[str]) -> str:
    """The lines without the indentation of the first one that is not blank: a program begins at
    the left.
    """
    first = next((line for line in lines if line.strip()), "")
    margin = len(first) - len(first.lstrip(" \t"))
    cuts = (min(margin, len(line) - len(line.lstrip(" \t"))) for line in lines)
    return "".join(f"{line[cut:]}\n" for line, cut in zip(lines, cuts, strict=True))


# The names that LiveCodeBench's harness gives every program, in its order: later ones replace
# earlier ones. The classes of `collections` replace their aliases in `typing`.
_HARNESS_MODULES = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
)
_HARNESS_NAMES = "\n".join(
    (
        *(f"from {module} import *" for module in (*_HARNESS_MODULES, "builtins", "typing")),
        "from collections import ChainMap, Counter, OrderedDict, defaultdict, deque",
        f"import os, {', '.join(_HARNESS_MODULES)}",
    )
)
# Runs in the sandbox. The imports take three times as long as the start of the interpreter: they
# are made where the program uses a name that neither it nor the interpreter defines.
_HARNESS = """\
import sys
sys.setrecursionlimit(50000)

def __uses_other_names(source):
    import builtins, symtable
    used, defined, tables = set(), set(), [symtable.symtable(source, "main.py", "exec")]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_assigned() or symbol.is_imported():
                if table.get_type() == "module" or symbol.is_global():
                    defined.add(symbol.get_name())
            elif symbol.is_global():
                used.add(symbol.get_name())
    others = used - defined - set(dir(builtins))
    return others or used & {{"eval", "exec", "globals", "locals", "vars"}}

__source = {source!r}
if __uses_other_names(__source):
    exec({names!r}, globals())
"""
_RUN = """\
exec(compile(__source, "main.py", "exec", dont_inherit=True), globals())
"""
# The program's prints go to stderr, so that stdout has the result alone.
_CALL = """\
import json, os
__result = os.dup(1)
os.dup2(2, 1)
__arguments = json.load(sys.stdin)
__name__ = "solution"
exec(compile(__source, "main.py", "exec", dont_inherit=True), globals())
__function = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
__value = json.dumps(__function(*__arguments)).encode()
while __value:
    __value = __value[os.write(__result, __value):]
os._exit(0)
"""


def with_harness(source: str) -> str:
    """A Python program that runs this one with the names and the recursion limit of
    LiveCodeBench's harness.
    """
    return _HARNESS.format(source=source, names=_HARNESS_NAMES) + _RUN


def calling(source: str, function: str) -> str:
    """A Python program that reads a JSON list of arguments and prints the JSON of what the function
    returns.

    function: of the program, or a method of its class Solution. The program has what `with_harness`
    gives it.
    """
    return _HARNESS.format(source=source, names=_HARNESS_NAMES) + _CALL.format(name=function)
