"""No module of the package imports itself through others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure.source_tree import Module, cycles, import_graph, read_modules

ROOT = Path(__file__).resolve().parents[2]


def module(name: str, source: str, *, package: bool = False) -> Module:
    path = name.replace(".", "/") + ("/__init__.py" if package else ".py")
    return Module(f"megatron_gspo.{name}", f"megatron_gspo/{path}", source)


@pytest.mark.parametrize("late", [False, True], ids=["imports at the top", "late imports too"])
def test_no_module_imports_in_a_circle(late: bool) -> None:
    assert cycles(import_graph(read_modules(ROOT), late=late)) == []


def test_a_cycle_of_late_imports_is_one_only_if_they_count() -> None:
    modules = [
        module("a", "from megatron_gspo.b import f"),
        module("b", "def f():\n from megatron_gspo.a import g"),
    ]
    assert cycles(import_graph(modules, late=False)) == []
    assert cycles(import_graph(modules, late=True)) == [["megatron_gspo.a", "megatron_gspo.b"]]


def test_a_relative_import_of_a_package_is_resolved() -> None:
    modules = [
        module("p", "from .a import f", package=True),
        module("p.a", "from . import b"),
        module("p.b", ""),
    ]
    graph = import_graph(modules, late=False)
    assert graph["megatron_gspo.p"] == {"megatron_gspo.p.a"}
    assert graph["megatron_gspo.p.a"] == {"megatron_gspo.p.b"}
