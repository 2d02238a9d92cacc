"""The chain of functions from the launch of a run to its loss, by a static walk.

A function leads to each function of the package that its body names: called, passed on, or bound by ``partial``. A
name is resolved through the definitions and imports of its module; ``self.name`` within the class; ``value.name`` if
exactly one class of the package defines a method of that name. A class leads to ``__init__`` and ``__call__``. The
result is the shortest such chain.
"""

from __future__ import annotations

import ast
from collections import defaultdict, deque

from tests.structure.source_tree import Module, imports

Graph = dict[str, set[str]]


def shortest_chain(modules: list[Module], start: str, end: str) -> list[str]:
    """The functions from `start` to `end` (dotted names), both included; [] if no chain is found."""
    graph = _call_graph(modules)
    before: dict[str, str] = {start: ""}
    todo = deque([start])
    while todo:
        here = todo.popleft()
        if here == end:
            chain = [here]
            while before[chain[0]]:
                chain.insert(0, before[chain[0]])
            return chain
        for other in sorted(graph.get(here, ())):
            if other not in before:
                before[other] = here
                todo.append(other)
    return []


def _call_graph(modules: list[Module]) -> Graph:
    owned: dict[str, dict[str, str]] = {}  # module -> name at its top -> dotted name
    bodies: dict[str, tuple[Module, ast.AST, str]] = {}  # dotted name -> (module, node, class or "")
    methods: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        owned[module.name] = {target.rpartition(".")[2]: target for _, target in imports(module)}
        owned[module.name] |= _aliases(module)
        for node in module.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{module.name}.{node.name}"
                owned[module.name][node.name] = name
                bodies[name] = (module, node, "")
                if isinstance(node, ast.ClassDef):
                    for child in node.body:
                        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                            bodies[f"{name}.{child.name}"] = (module, child, name)
                            methods[child.name].add(f"{name}.{child.name}")
    graph: Graph = {}
    for name, (module, node, owner) in bodies.items():
        if isinstance(node, ast.ClassDef):
            graph[name] = {f"{name}.{special}" for special in ("__init__", "__call__")} & bodies.keys()
            continue
        graph[name] = set()
        for target in _named(node, owned[module.name], owner, methods):
            target = _resolve(target, bodies, owned)
            if target in bodies and target != name:
                graph[name].add(target)
    return graph


def _aliases(module: Module) -> dict[str, str]:
    """Names that ``import ... as`` gives."""
    found = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname: f"{node.module}.{alias.name}" for alias in node.names if alias.asname}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


def _named(node: ast.AST, names: dict[str, str], owner: str, methods: dict[str, set[str]]) -> set[str]:
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and child.id in names:
            found.add(names[child.id])
        elif isinstance(child, ast.Attribute):
            value = child.value
            if isinstance(value, ast.Name) and value.id == "self" and owner:
                found.add(f"{owner}.{child.attr}")
            elif isinstance(value, ast.Name) and value.id in names:
                found.add(f"{names[value.id]}.{child.attr}")
            elif len(methods[child.attr]) == 1:
                found |= methods[child.attr]
    return found


def _resolve(target: str, bodies: dict[str, tuple[Module, ast.AST, str]], owned: dict[str, dict[str, str]]) -> str:
    """Follow a name that a package's ``__init__`` imports from elsewhere."""
    for _ in range(4):
        if target in bodies:
            return target
        base, _, last = target.rpartition(".")
        if base not in owned or last not in owned[base]:
            return target
        target = owned[base][last]
    return target
