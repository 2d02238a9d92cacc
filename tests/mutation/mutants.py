"""Mutants of a source file: mutmut's operators on every node of it.

mutmut's own runner leaves out decorated functions, properties, class fields and module-level tables, and its
choice of a mutant does not reach processes that a fork server starts. So its operators alone are used here, and
a mutant is a whole source text that goes into a file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators


@dataclass(frozen=True)
class Mutant:
    """`key` names it for as long as the line and the change stay the same, wherever the line moves."""

    key: str
    line: int
    operator: str
    before: str
    after: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """Every mutant of `source` that is another program, in the order of lines."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    positions, module = wrapper.resolve(PositionProvider), wrapper.module
    texts = [module.code_for_node(statement) for statement in module.body]
    begin = source.index(texts[0]) if texts else 0
    found, seen = [], {source}
    for i, statement in enumerate(module.body):
        before = source[: begin + sum(map(len, texts[:i]))]
        after = source[len(before) + len(texts[i]) :]
        for node in _nodes(statement):
            for operator, changed in _changes(node):
                text = before + module.code_for_node(statement.deep_replace(node, changed)) + after
                if text not in seen:
                    seen.add(text)
                    found.append((positions[node].start.line, operator, text))
    found.sort(key=lambda item: item[0])
    times: Counter[str] = Counter()
    return [_mutant(source, operator, text, times) for _, operator, text in found]


def remove_decorator(node: cst.FunctionDef) -> Iterable[cst.FunctionDef]:
    """The one operator that mutmut lacks: drop each decorator of a function."""
    for i in range(len(node.decorators)):
        yield node.with_changes(decorators=[*node.decorators[:i], *node.decorators[i + 1 :]])


OPERATORS = [*mutation_operators, (cst.FunctionDef, remove_decorator)]


def _changes(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    for kind, operator in OPERATORS:
        if isinstance(node, kind):
            for changed in operator(node):
                yield operator.__name__.removeprefix("operator_"), changed


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """All nodes but annotations and type aliases (nothing reads them), decorators' insides, `__all__`, `strict` of zip
    (an assertion), and, as mutmut has it, calls of len and isinstance.
    """
    exported = m.Assign(targets=[m.AssignTarget(target=m.Name("__all__"))])
    alias = m.AnnAssign(annotation=m.Annotation(annotation=m.Name("TypeAlias")))
    alias |= m.Assign(value=m.Call(func=m.Name("TypeVar")))
    spared = m.Call(func=m.Name("len") | m.Name("isinstance"))
    if m.matches(node, m.Annotation() | m.Decorator() | exported | alias | spared):
        return
    if m.matches(node, m.Call(func=m.Name("zip"), args=[m.AtLeastN(n=1), m.Arg(keyword=m.Name("strict"))])):
        for child in node.children[:-1]:
            yield from _nodes(child)
        return
    yield node
    for child in node.children:
        yield from _nodes(child)


def _mutant(source: str, operator: str, text: str, times: Counter[str]) -> Mutant:
    before, after = source.splitlines(), text.splitlines()
    first = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    last = next(i for i, (a, b) in enumerate(zip(before[::-1], after[::-1], strict=False)) if a != b)
    old = "\n".join(before[first : max(len(before) - last, first + 1)]).strip()
    new = "\n".join(after[first : max(len(after) - last, first)]).strip()
    change = f"{operator}\n{old}\n{new}"
    times[change] += 1
    key = hashlib.sha256(f"{change}\n{times[change]}".encode()).hexdigest()[:10]
    return Mutant(key, first + 1, operator, old, new, text)
