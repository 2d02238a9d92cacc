"""Run this folder's tests and fail if any of them was skipped: `python -m tests.peers [pytest
arguments]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


class NoSkips:
    """Turns a run with skipped tests into a failed one: a peer that is absent proves nothing."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)


def main() -> int:
    watch = NoSkips()
    code = pytest.main([str(Path(__file__).parent), *sys.argv[1:]], plugins=[watch])
    if watch.skipped:
        print(
            f"skipped where nothing may be: {', '.join(watch.skipped)}; install what is missing",
            file=sys.stderr,
        )
    return int(code) or int(bool(watch.skipped))


if __name__ == "__main__":
    sys.exit(main())
