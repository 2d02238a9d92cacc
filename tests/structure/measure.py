"""Measure the structure of a checkout of this project.

    python -m tests.structure.measure [PATH] [--json FILE] [--list]

PATH is a checkout (default: this one); older ones can be measured as well. Prints one line per figure; --list adds
what each figure counts. Everything is read from the source; nothing of the measured checkout is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.structure.call_path import shortest_chain
from tests.structure.duplicates import find_duplicates
from tests.structure.source_tree import (
    MAPPED,
    PACKAGE,
    Module,
    cycles,
    functions,
    import_graph,
    imports,
    length,
    parameter_count,
    read_modules,
)

ROOT = Path(__file__).resolve().parents[2]
LAUNCH, LOSS = f"{PACKAGE}.train.main", f"{PACKAGE}.algorithms.policy_loss.policy_loss"
LONG_FUNCTION, MANY_PARAMETERS, NEEDS_A_TEST = 60, 7, 30
SPECIAL = ("__init__.py", "__main__.py")


def measure(root: Path) -> dict[str, Any]:
    """All figures of a checkout; lists hold what is counted."""
    modules = read_modules(root)
    tests = read_modules(root, ("tests",))
    chain = shortest_chain(modules, LAUNCH, LOSS)
    large = [module for module in modules if needs_a_test(module)]
    return {
        "lines": lines_per_package(modules + tests + read_modules(root, ("benchmarks", "examples"))),
        "functions from launch to loss": chain,
        "modules of 30 lines or more": len(large),
        "modules without a test in the mirrored folder": untested(large, tests),
        "modules without a test of their name": untested(large, tests, mirrored=False),
        "functions over 60 lines": long_functions(modules),
        "functions with more than 7 parameters": wide_functions(modules),
        "import cycles": [" ".join(group) for group in cycles(import_graph(modules, late=False))],
        "import cycles, late imports included": [" ".join(g) for g in cycles(import_graph(modules, late=True))],
        "imports against the layers": layer_violations(root, modules),
        "words": words(root),
        "duplicated blocks": [f"{d.first} = {d.second}: {d.lines} lines" for d in find_duplicates(modules)],
        "duplicated blocks in tests": [f"{d.first} = {d.second}: {d.lines} lines" for d in find_duplicates(tests)],
        "file names in several folders": repeated_names(modules),
    }


def lines_per_package(modules: list[Module]) -> dict[str, dict[str, int]]:
    """{package: {"lines", "code"}}; code is without blank lines, comments and docstrings."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for module in modules:
        parts = module.path.split("/")
        top = "megatron_gspo" if parts[0] == PACKAGE else parts[0]
        package = "/".join(parts[:2]) if top in (PACKAGE, "tools") and len(parts) > 2 else f"{top} (top)"
        for name in (package, f"all of {top}"):
            found[name] += Counter(lines=module.length, code=len(module.code_lines))
    return {name: dict(found[name]) for name in sorted(found)}


def needs_a_test(module: Module) -> bool:
    return module.length >= NEEDS_A_TEST and not module.is_package


def untested(modules: list[Module], tests: list[Module], *, mirrored: bool = True) -> list[str]:
    """Modules without ``test_NAME.py`` or ``test_NAME_*.py``, in the mirrored folder of tests/ or anywhere in it."""
    folders: dict[str, set[str]] = defaultdict(set)
    for test in tests:
        folder, _, name = test.path.rpartition("/")
        folders[folder if mirrored else ""].add(name.removesuffix(".py"))
    missing = []
    for module in modules:
        folder, _, name = module.path.removeprefix(f"{PACKAGE}/").rpartition("/")
        own = f"test_{name.removesuffix('.py').strip('_')}"
        there = folders["/".join(filter(None, ("tests", folder))) if mirrored else ""]
        if not any(test == own or test.startswith(f"{own}_") for test in there):
            missing.append(module.path)
    return missing


def long_functions(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:{name}: {length(node)} lines"
        for module in modules
        for name, node, _ in functions(module)
        if length(node) > LONG_FUNCTION
    ]


def wide_functions(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:{name}: {count} parameters"
        for module in modules
        for name, node, is_method in functions(module)
        if (count := parameter_count(node, is_method)) > MANY_PARAMETERS
    ]


def layer_violations(root: Path, modules: list[Module]) -> list[str]:
    """Imports that point up the list LAYERS of the checkout's own tests/test_layers.py."""
    layers = declared_layers(root)
    order = {name: number for number, name in enumerate(layers)}
    found = []
    for module in modules:
        part = part_of(module.name)
        for line, target in imports(module):
            other = part_of(target) if target.startswith(f"{PACKAGE}.") else ""
            if part in order and other in order and order[other] > order[part]:
                found.append(f"{module.path}:{line} imports {target}")
    return found


def declared_layers(root: Path) -> list[str]:
    for node in ast.parse((root / "tests" / "test_layers.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{root}/tests/test_layers.py has no list LAYERS")


def part_of(name: str) -> str:
    """The part of the package that a dotted name is in; "" for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def words(root: Path) -> dict[str, int]:
    """Words of README and docs together, of each page, and of the other Markdown files.

    A word has a letter or a digit: the bars and rules of tables are none.
    """
    pages = [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]
    others = set(root.glob("*.md")).union(*((root / top).glob("**/*.md") for top in ("benchmarks", *MAPPED, ".github")))
    counted = {file: count_words(file.read_text(encoding="utf-8")) for file in sorted({*pages, *others})}
    total = {"README and docs": sum(counted[file] for file in pages)}
    total["other Markdown"] = sum(counted.values()) - total["README and docs"]
    return {**total, **{file.relative_to(root).as_posix(): count for file, count in counted.items()}}


def count_words(text: str) -> int:
    return sum(any(map(str.isalnum, part)) for part in text.split())


def repeated_names(modules: list[Module]) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        folder, _, name = module.path.rpartition("/")
        if name not in SPECIAL:
            places[name].append(folder)
    return [f"{name}: {', '.join(folders)}" for name, folders in sorted(places.items()) if len(folders) > 1]


def summary(figures: dict[str, Any]) -> dict[str, int]:
    """One number per figure."""
    result = {}
    for name, value in figures.items():
        if name == "lines":
            result |= {f"{key}, {kind}": n for key, sizes in value.items() for kind, n in sizes.items()}
        elif name == "words":
            result |= {f"words: {key}": value[key] for key in ("README and docs", "other Markdown")}
        else:
            result[name] = value if isinstance(value, int) else len(value)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--json", type=Path, help="also write the figures and what they count to this file")
    parser.add_argument("--list", action="store_true", help="print what is counted")
    args = parser.parse_args()
    figures = measure(args.path.resolve())
    for name, count in summary(figures).items():
        print(f"{count:>7}  {name}")
        if args.list and isinstance(figures.get(name), list):
            print(*(f"{'':9}{line}" for line in figures[name]), sep="\n")
    print("launch to loss:", *figures["functions from launch to loss"], sep="\n         ")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
