"""Agents of real packages: `make test-agents` passes the interpreter that has them; without, they
are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.real_servers import python_of

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--agents-python") is None:
        skip = pytest.mark.skip(reason="needs agents' packages: make test-agents")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def agents_python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has the packages."""
    return python_of(request.config, "agents")
