"""Imports only point down the layers, and only mcore/ and patches/ import Megatron.

Read from the source.
"""

import re
import sys
from pathlib import Path

from tests.structure.source_tree import PACKAGE, Module, imports, part_of, read_modules

ROOT = Path(__file__).parents[1]

# From the bottom up. A part may import itself and the parts before it, never one after it.
LAYERS = (
    "errors",
    "gpus",
    "terminal",
    "given_names",
    "launch_environment",
    "paths",
    "user_code",
    "objectives",
    "algorithms",
    "models",
    "config",
    "kernels",
    "parallel",
    "routing_replay",
    "data",
    "servers",
    "rewards",
    "weight_transport",
    "rollout",
    "agents",
    "environments",
    "tracking",
    "patches",
    "mcore",
    "loop",
    "train",
    "tools",
    "cli",
    "__main__",
)
KNOWS_MEGATRON = {"mcore", "patches"}
# Third-party packages of the lowest layers; the standard library is free.
ONLY = {
    "objectives": set(),
    "algorithms": {"torch"},
    "kernels": {"torch", "triton"},
    "parallel": {"torch", "numpy", "msgspec"},
}


def faults(module: Module) -> list[str]:
    name = module.name
    part = part_of(module.name)
    wrong = []
    for line, target in imports(module):
        top = target.partition(".")[0]
        other = part_of(target)
        if (
            top == PACKAGE
            and part in LAYERS
            and other in LAYERS
            and LAYERS.index(other) > LAYERS.index(part)
        ):
            wrong.append(f"{name}:{line} imports {target}: {other} lies above {part}")
        if top == PACKAGE and part == "" and other in LAYERS:
            wrong.append(
                f"{name}:{line} imports {target}: the package itself imports nothing of its own"
            )
        if top == "megatron" and part not in KNOWS_MEGATRON:
            wrong.append(
                f"{name}:{line} imports {target}: only {' and '.join(sorted(KNOWS_MEGATRON))} may"
            )
        allowed = ONLY.get(part)
        third_party = top not in sys.stdlib_module_names and top != PACKAGE
        if allowed is not None and third_party and top not in allowed:
            wrong.append(
                f"{name}:{line} imports {target}: {part} needs {', '.join(sorted(allowed))} and"
                " nothing else"
            )
    return wrong


def test_every_part_has_a_layer() -> None:
    parts = {part_of(module.name) for module in read_modules(ROOT)} - {""}
    assert parts <= set(LAYERS), f"give {parts - set(LAYERS)} a place in LAYERS"
    assert {"algorithms", "config", "data", "patches"} <= parts


def test_the_architecture_page_lists_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## Layers", 1)[1].split("\n## ", 1)[0]
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", section, flags=re.MULTILINE)
    assert listed == [name for name in reversed(LAYERS) if name != "__main__"]


def test_imports_point_down() -> None:
    wrong = [fault for module in read_modules(ROOT) for fault in faults(module)]
    assert wrong == []
