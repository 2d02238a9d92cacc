"""The structure of the code stays within its limits; ``python -m tests.structure.measure --list`` shows all figures."""

from __future__ import annotations

from tests.structure import measure
from tests.structure.source_tree import cycles, import_graph, read_modules

MODULES = read_modules(measure.ROOT)


def test_no_module_imports_in_a_circle():
    assert cycles(import_graph(MODULES, late=False)) == []
