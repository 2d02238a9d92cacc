"""One known bug as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SeededBug:
    """One wrong version of the code.

    `seen_in`: where it was met. `file`: relative to the project. `before`: text that occurs in it once; `after` takes
    its place. `tests`: pytest ids, at least one of which must fail with an assertion.
    """

    name: str
    seen_in: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
