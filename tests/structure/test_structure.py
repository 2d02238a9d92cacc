"""No module of the package imports itself through others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure.source_tree import cycles, import_graph, read_modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("late", [False, True], ids=["imports at the top", "late imports too"])
def test_no_module_imports_in_a_circle(late: bool) -> None:
    assert cycles(import_graph(read_modules(ROOT), late=late)) == []
