"""The structure of the code stays within its limits; ``python -m tests.structure.measure --list`` shows all figures.

A limit that is not reached yet is a number that only goes down.
"""

from __future__ import annotations

from tests.structure import measure
from tests.structure.source_tree import cycles, import_graph, read_modules

MODULES = read_modules(measure.ROOT)
TESTS = read_modules(measure.ROOT, ("tests",))
WIDE_FUNCTIONS = 3  # more than 7 parameters
UNTESTED_MODULES = 0  # of 30 lines or more without a test of their name
LAUNCH_TO_LOSS = 8  # functions


def test_no_module_imports_in_a_circle():
    assert cycles(import_graph(MODULES, late=False)) == []
    assert cycles(import_graph(MODULES, late=True)) == []


def test_functions_are_short():
    assert measure.long_functions(MODULES) == []


def test_few_functions_have_many_parameters():
    assert len(measure.wide_functions(MODULES)) <= WIDE_FUNCTIONS, measure.wide_functions(MODULES)


def test_modules_have_a_test_of_their_own():
    missing = measure.untested([module for module in MODULES if measure.needs_a_test(module)], TESTS)
    assert len(missing) <= UNTESTED_MODULES, missing


def test_the_path_from_launch_to_loss_is_short():
    chain = measure.shortest_chain(MODULES, measure.LAUNCH, measure.LOSS)
    assert 2 <= len(chain) <= LAUNCH_TO_LOSS, chain
