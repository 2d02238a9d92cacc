"""Programs: the code of a response, and what calls a function of it."""

from __future__ import annotations

_NAMES = {"python": ("", "python", "python3", "py"), "cpp": ("", "cpp", "c++", "cc", "cxx")}
_FENCE = "```"

CPP_COMPILER = "/usr/bin/g++"
CPP_OPTIONS = "-O2 -std=c++17"

# Runs in the sandbox. The program's prints go to stderr, so that stdout has the result alone. The names are those that
# LeetCode imports for its users.
_CALL = """\
import bisect, collections, functools, heapq, itertools, json, math, operator, os, random, re, string, sys
from typing import *
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, floor, gcd, inf, sqrt
__result = os.dup(1)
os.dup2(2, 1)
__arguments = json.load(sys.stdin)
__name__ = "solution"
exec(compile({source!r}, "main.py", "exec"), globals())
__function = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
__value = json.dumps(__function(*__arguments)).encode()
while __value:
    __value = __value[os.write(__result, __value):]
os._exit(0)
"""


def extract_code(response: str, language: str) -> str | None:
    """The last complete fenced block of the language; without any fence the whole response; None if neither."""
    found: str | None = None
    block: list[str] | None = None
    opened = False
    for line in response.split("\n"):
        if not line.lstrip().startswith(_FENCE):
            if block is not None:
                block.append(line)
        elif not opened:
            opened = True
            info = line.strip().strip("`").strip().lower()
            block = [] if info in _NAMES[language] else None
        else:
            found = found if block is None else "\n".join(block) + "\n"
            opened, block = False, None
    return found if found is not None or _FENCE in response else response


def calling(source: str, function: str) -> str:
    """A Python program that reads a JSON list of arguments and prints the JSON of what the function returns.

    function: of the program, or a method of its class Solution.
    """
    return _CALL.format(source=source, name=function)
