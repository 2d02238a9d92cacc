"""One known bug, and how it is written into the code."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class SeededBug:
    """One wrong version of the code.

    file: relative to the project. before: code that occurs in it once; after: what takes its place.
    Both are written as `ast.unparse` writes code, so that the formatting and the comments of the
    file do not matter. test: the pytest id of a test that must fail with an assertion.
    """

    name: str
    file: str
    before: str
    after: str
    test: str

    def apply(self, source: str) -> str:
        """The source with the bug in it, without comments.

        Raises:
            ValueError: `before` does not occur exactly once.
        """
        code = ast.unparse(ast.parse(source))
        count = code.count(self.before)
        if count != 1:
            raise ValueError(
                f"seeded bug '{self.name}': {self.file} has {count} times, not once: {self.before}"
            )
        return code.replace(self.before, self.after)
