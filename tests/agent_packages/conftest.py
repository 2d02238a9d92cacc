"""Agents of real packages: `make test-agents` passes the folder of their environments;
without, they are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--agents-environments") is None:
        skip = pytest.mark.skip(reason="needs agents' packages: make test-agents")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def environments(request: pytest.FixtureRequest) -> Path:
    """The folder of the packages' environments."""
    return request.config.getoption("--agents-environments").absolute()
