"""Imports only point down the layers, and only mcore/ and patches/ import Megatron.

Read from the source.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure.source_tree import PACKAGE, Module, imports, part_of, read_modules

ROOT = Path(__file__).parents[1]

# From the bottom up. A part may import itself and the parts before it, never one after it.
LAYERS = (
    "errors",
    "terminal",
    "given_names",
    "launch_environment",
    "paths",
    "user_code",
    "algorithms",
    "models",
    "config",
    "parallel",
    "routing_replay",
    "data",
    "rewards",
    "servers",
    "weight_transport",
    "rollout",
    "environments",
    "agents",
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
ONLY = {"algorithms": {"torch"}, "parallel": {"torch", "numpy", "msgspec"}}


def faults(module: Module) -> list[str]:
    name = module.name
    part = part_of(module.name)
    found = []
    for line, target in imports(module):
        top = target.partition(".")[0]
        other = part_of(target)
        if (
            top == PACKAGE
            and part in LAYERS
            and other in LAYERS
            and LAYERS.index(other) > LAYERS.index(part)
        ):
            found.append(f"{name}:{line} imports {target}: {other} lies above {part}")
        if top == PACKAGE and part == "" and other in LAYERS:
            found.append(
                f"{name}:{line} imports {target}: the package itself imports nothing of its own"
            )
        if top == "megatron" and part not in KNOWS_MEGATRON:
            found.append(
                f"{name}:{line} imports {target}: only {' and '.join(sorted(KNOWS_MEGATRON))} may"
            )
        allowed = ONLY.get(part)
        third_party = top not in sys.stdlib_module_names and top != PACKAGE
        if allowed is not None and third_party and top not in allowed:
            found.append(
                f"{name}:{line} imports {target}: {part} needs {', '.join(sorted(allowed))} and"
                " nothing else"
            )
    return found


def module_of(name: str, source: str) -> Module:
    """A module as `read_modules` gives it; NAME.__init__ is the package NAME."""
    return Module(name.removesuffix(".__init__"), f"{name.replace('.', '/')}.py", source)


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
    found = [fault for module in read_modules(ROOT) for fault in faults(module)]
    assert found == []


@pytest.mark.parametrize(
    "name, source",
    [
        ("megatron_gspo.algorithms.kl", "from megatron_gspo.data import Sample"),
        ("megatron_gspo.algorithms.kl", "from ..data.sample import Sample"),
        ("megatron_gspo.algorithms.__init__", "from ..mcore import model"),
        ("megatron_gspo.data.sample", "def late():\n    import megatron.core"),
        (
            "megatron_gspo.config.model_checks",
            "import importlib\nimportlib.import_module('megatron.core')",
        ),
        ("megatron_gspo.rollout.embedded.embedded_engine", "from megatron_gspo import mcore"),
        ("megatron_gspo.mcore.model", "from megatron_gspo.loop import assemble"),
        ("megatron_gspo.algorithms.ratio", "import numpy as np"),
        ("megatron_gspo.__init__", "from megatron_gspo.algorithms import preset"),
    ],
)
def test_a_wrong_import_is_found(name: str, source: str) -> None:
    assert len(faults(module_of(name, source))) >= 1


@pytest.mark.parametrize(
    "name, source",
    [
        (
            "megatron_gspo.mcore.model",
            "import megatron.core\nfrom megatron_gspo.patches import apply_patches",
        ),
        ("megatron_gspo.algorithms.kl", "import torch, math\nfrom .ratio import log_ratio"),
        (
            "megatron_gspo.patches.mark",
            "from megatron_gspo.patches import mark\nfrom . import mark",
        ),
        ("megatron_gspo.config.schema", "from megatron_gspo.algorithms import preset"),
    ],
)
def test_a_right_import_passes(name: str, source: str) -> None:
    assert faults(module_of(name, source)) == []


def test_algorithms_load_with_torch_alone() -> None:
    code = (
        "import sys, megatron_gspo.algorithms\n"
        "heavy = {'megatron', 'transformers', 'pydantic', 'yaml', 'rich', 'datasets'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
