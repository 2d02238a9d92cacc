"""The Python modules of a checkout and their imports, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "megatron_gspo"
MAPPED = ("patches", "tools")  # folders of the checkout that are installed inside the package


@dataclass(frozen=True)
class Module:
    """One source file. name: dotted, as installed. path: relative to the checkout."""

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")


def part_of(name: str) -> str:
    """The part of the package that a dotted name is in; "" for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def read_modules(root: Path, folders: tuple[str, ...] = (PACKAGE, *MAPPED)) -> list[Module]:
    """The modules below some folders of a checkout; ``patches`` and ``tools`` under the names
    they are installed by.
    """
    modules = []
    for folder in folders:
        prefix = f"{PACKAGE}.{folder}" if folder in MAPPED else folder
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            name = ".".join((prefix, *parts)).removesuffix(".__init__")
            modules.append(
                Module(name, file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
            )
    return modules


def imports(module: Module, *, late: bool = True) -> list[tuple[int, str]]:
    """(line, dotted target) of each import, relative ones resolved; ``from a import b`` is a.b.

    late: also those inside functions and under ``if TYPE_CHECKING``.
    """
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    targets = []
    for node in ast.walk(module.tree) if late else _statements(module.tree.body):
        if isinstance(node, ast.Import):
            targets += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            targets += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
            targets += [(node.lineno, value) for value in constants if isinstance(value, str)]
    return targets


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import of the module runs."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def import_graph(modules: list[Module], *, late: bool) -> dict[str, set[str]]:
    """Which modules each module imports; a name imported from a package's ``__init__`` counts
    as that package.
    """
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for _, target in imports(module, late=late):
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target and target != module.name:
                graph[module.name].add(target)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of two or more nodes that reach each other."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {
        tuple(sorted({node} | {o for o in reach[node] if node in reach[o]})) for node in graph
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for other in graph[todo.pop()]:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen
