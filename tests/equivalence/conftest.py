"""`--every N` runs one in N of the layouts, spread over their list; `--last-cases` runs the last
case of each other test of test_layouts.py, the largest, where otherwise all of them run. With
`--part`, what `make test` names always runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import IN_UNIT


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--every")
    always = IN_UNIT if config.getoption("--part") else ()
    here = Path(__file__).parent
    names = ("test_moe[", "test_dense[", "test_family[", "test_lora[")
    layouts = [item for item in items if here in item.path.parents and item.name.startswith(names)]
    # another position in each group of N: a fixed one would always select the same of three
    # rotating choices
    left_out = {
        id(item)
        for index, item in enumerate(layouts)
        if index % every != index // every % every and item.nodeid not in always
    }
    if config.getoption("--last-cases"):
        file = here / "test_layouts.py"
        others = [item for item in items if item.path == file and item not in layouts]
        last = {item.nodeid.partition("[")[0]: item for item in others}
        left_out |= {id(item) for item in others} - {id(item) for item in last.values()}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]
