"""A server, or another program in its place, can neither run code here nor read the key."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "megatron_gspo"
SOURCES = sorted(
    source
    for folder in ("rollout/sglang", "rollout/server_engine", "servers", "weight_transport")
    for source in (PACKAGE / folder).glob("*.py")
)
# (module, name) of what makes objects or code of bytes
LOADERS = {
    ("pickle", "load"),
    ("pickle", "loads"),
    ("pickle", "Unpickler"),
    ("torch", "load"),
    ("marshal", "load"),
    ("marshal", "loads"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("np", "load"),
    ("numpy", "load"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("shelve", "open"),
    ("joblib", "load"),
}


def loaders_in(text: str) -> set[tuple[str, str]]:
    """Those of LOADERS that a source names, however it imports them."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add((node.value.id, node.attr))
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            assert not any(
                alias.asname and alias.name in ("pickle", "torch", "marshal")
                for alias in node.names
            )
        elif isinstance(node, ast.Name):
            found.add(("builtins", node.id))
    return found & LOADERS


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_that_a_server_sends_is_unpickled(source):
    assert loaders_in(source.read_text()) == set()
