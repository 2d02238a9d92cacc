"""What a page cites: paths, symbols, commands, config keys and metric names. Finds those that do
not exist.

Cited is what stands in backticks and in code blocks:

- ``folder/file.py``, ``file.py``, ``file.py:function``: from the root of the checkout or of the
  package.
- ``megatron_gspo.a.b`` and other dotted names of modules; ``identifier_with_underscore``,
  ``ClassName``, ``call()``: the name must occur in the source.
- ``section.key`` and ``section.key=value`` of the config, and the keys of YAML blocks:
  docs/config.md lists all keys.
- ``prefix/name`` of a metric: docs/metrics.md lists all metrics.
- ``make target``, ``megatron-gspo command``, ``python -m module``, ``python file.py``,
  ``--option``.

docs/config.md and docs/metrics.md are compared with the code by tests of their own.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import yaml

PACKAGE = "megatron_gspo"
# A cited path starts at one of these folders.
BASES = ("", PACKAGE, "docs", "tests", "tools", "patches", "benchmarks", "examples")
SUFFIXES = "py|md|yaml|yml|json|jsonl|sh|toml|html|csv|txt|cfg|cff"
NAMES_WHAT_IS_MISSING = ("tests/structure/", "tests/test_docs.py")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", flags=re.MULTILINE | re.DOTALL)
FOREIGN_OPTIONS = frozenset(
    {
        "--help",
        "--version",
        "--standalone",
        "--nproc-per-node",
        "--nnodes",
        "--node-rank",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--master-addr",
        "--master-port",
        "--max-restarts",
        "--gpus-all",
    }
)


@dataclass(frozen=True)
class Project:
    """A checkout, with what a page may cite in it."""

    root: Path

    @cached_property
    def files(self) -> set[str]:
        """Every file that git tracks or would track, relative to the root."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(
            command, cwd=self.root, capture_output=True, text=True, check=True
        ).stdout
        return {name for name in listed.splitlines() if (self.root / name).is_file()}

    @cached_property
    def folders(self) -> set[str]:
        return {parent.as_posix() for name in self.files for parent in Path(name).parents}

    @cached_property
    def source(self) -> str:
        """All text but the Markdown pages and data."""
        wanted = [
            n
            for n in self.files
            if n.endswith((".py", ".sh", ".yaml", ".toml", "Makefile", ".ci/run", ".html"))
        ]
        wanted = [name for name in wanted if not name.startswith(NAMES_WHAT_IS_MISSING)]
        return "\n".join((self.root / name).read_text(encoding="utf-8") for name in sorted(wanted))

    @cached_property
    def words(self) -> set[str]:
        return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", self.source))

    @cached_property
    def targets(self) -> set[str]:
        """Targets of the Makefile."""
        rules = re.findall(
            r"^([\w -]+):", (self.root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        return {name for rule in rules for name in rule.split()}

    @cached_property
    def subcommands(self) -> set[str]:
        """Text constants of the console command's module, which name its subcommands."""
        file = self.root / PACKAGE / "cli.py"
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else ()
        return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}

    @cached_property
    def keys(self) -> set[str]:
        """Dotted config keys, from the generated page."""
        return set(_table_names(self.root / "docs" / "config.md", dotted=True))

    @cached_property
    def sections(self) -> set[str]:
        return {key.partition(".")[0] for key in self.keys if "." in key}

    @cached_property
    def metrics(self) -> set[str]:
        return set(_table_names(self.root / "docs" / "metrics.md", dotted=False))

    def tracks(self, name: str) -> bool:
        """Whether a file or folder (a glob pattern too) is in the checkout."""
        starts = [f"{base}/{name}" if base else name for base in BASES]
        return any(
            fnmatchcase(known, start) for start in starts for known in self.files | self.folders
        )

    def has_path(self, name: str) -> bool:
        """The same, or a file's name, or a path that the program writes."""
        name = name.removeprefix("./").rstrip("/")
        if self.tracks(name):
            return True
        if "/" not in name and any(Path(file).name == name for file in self.files):
            return True
        # A file that the program writes or reads, or one with a placeholder in its name.
        return not name.endswith(".py") and (
            Path(name).name in self.source or bool(re.search(r"[A-Z]{3}|\.{3}", name))
        )

    def has_symbol(self, file: str, symbol: str) -> bool:
        """Whether a module defines ``function``, ``Class`` or ``Class.method`` at its top level."""
        modules = [name for name in self.files if name == file or name.endswith(f"/{file}")]
        return any(
            symbol in defined_names(self.root / name) for name in modules if name.endswith(".py")
        )

    def has_module(self, name: str) -> bool:
        """Whether a dotted name is a module of the checkout, or a symbol of one."""
        parts = name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in ("tools", "patches"):
            parts = parts[1:]
        for end in range(len(parts), 0, -1):
            base = "/".join(parts[:end])
            for file in (f"{base}.py", f"{base}/__init__.py"):
                if file in self.files:
                    rest = ".".join(parts[end:])
                    return not rest or rest in defined_names(self.root / file, imported=True)
        return "/".join(parts) in self.folders


def defined_names(file: Path, *, imported: bool = False) -> set[str]:
    """What a module defines at its top, with the members of its classes."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for name in _assigned_or_defined(node.body)}
        elif imported and isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names | _assigned_or_defined(ast.parse(file.read_text(encoding="utf-8")).body)


def _assigned_or_defined(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def _table_names(page: Path, *, dotted: bool) -> Iterator[str]:
    """Names in the first column of a page's tables; dotted: with the section's heading in front."""
    section = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"#+ `?([\w.]+)`?$", line):
            section = heading[1]
        elif line.startswith("#"):
            section = ""
        elif line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
                yield (
                    f"{section}.{name}"
                    if dotted and section and not name.startswith(f"{section}.")
                    else name
                )


def missing(project: Project, page: Path) -> list[str]:
    """What the page cites and the project does not have, each with the reason."""
    text = page.read_text(encoding="utf-8")
    blocks = [(language, body) for _, language, body in FENCE.findall(text)]
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text))
    faults = [fault for span in spans for fault in span_faults(project, span)]
    for language, body in blocks:
        if language in ("bash", "sh", "console", ""):
            faults += command_faults(project, body)
        elif language == "yaml":
            faults += yaml_faults(project, body)
    return sorted(set(faults))


def span_faults(project: Project, span: str) -> list[str]:
    """The faults of one span of inline code."""
    faults = command_faults(project, span)
    if " " in span or faults:
        return faults
    if match := re.fullmatch(rf"([\w./*-]+\.(?:{SUFFIXES}))(?::([\w.]+))?", span):
        if not project.has_path(match[1]):
            return [f"no file {match[1]}"]
        if match[2] and not project.has_symbol(match[1], match[2]):
            return [f"{match[1]} does not define {match[2]}"]
    elif re.fullmatch(r"\.?[\w-]+(/[\w-]+)*/", span):
        return [] if project.has_path(span) else [f"no folder {span}"]
    elif match := re.fullmatch(r"([a-z_]+)\.([a-z_]+(?:\.[a-z_*]+)*)", span):
        return dotted_faults(project, span, match[1])
    elif match := re.fullmatch(r"([a-z_]+)/([a-z_*]+)", span):
        prefixes = {name.partition("/")[0] for name in project.metrics if "/" in name}
        if match[1] in prefixes and not any(fnmatchcase(name, span) for name in project.metrics):
            return [] if project.tracks(span) else [f"no metric {span}"]
    elif match := re.fullmatch(r"([A-Za-z_]\w*)(\(\))?", span):
        named = "_" in span or match[2] or re.search(r"[a-z][A-Z]", span)
        if named and match[1] not in project.words:
            return [f"the source has no {match[1]}"]
    return []


def dotted_faults(project: Project, name: str, first: str) -> list[str]:
    if first in project.sections:
        known = any(
            key == name or key.startswith(f"{name}.") or fnmatchcase(key, name)
            for key in project.keys
        )
        # Below a key that takes any mapping.
        free = any(name.startswith(f"{key}.") for key in project.keys)
        return (
            []
            if known or free or project.has_module(f"{PACKAGE}.{name}")
            else [f"no config key {name}"]
        )
    if first in (PACKAGE, "tests", "benchmarks"):
        name = name.removesuffix(".*")
        return [] if project.has_module(name) else [f"no module or symbol {name}"]
    return []


def command_faults(project: Project, text: str) -> list[str]:
    """The faults of the commands in a block of shell lines or a span."""
    faults = []
    text = re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE)
    for target in re.findall(r"^\s*(?:\w+=\S+ )*make ((?:[\w-]+ ?)+)", text, re.MULTILINE):
        faults += [
            f"no target make {name}" for name in target.split()[:1] if name not in project.targets
        ]
    for name in re.findall(r"\bmegatron-gspo ([a-z]+)\b", text):
        faults += [f"no subcommand megatron-gspo {name}"] if name not in project.subcommands else []
    for name in re.findall(r"\s-m ((?:megatron_gspo|tests|benchmarks)[\w.]*)", text):
        faults += [f"no module {name}"] if not project.has_module(name) else []
    for name in re.findall(r"\bpython\S* ((?:[\w.-]+/)*[\w-]+\.py)\b", text):
        faults += [f"no file {name}"] if not project.has_path(name) else []
    for key in re.findall(r"(?:^|\s)([a-z]+\.[a-z_.]+)=", text):
        faults += dotted_faults(project, key, key.partition(".")[0])
    if "gspo" in text or "torchrun" in text or "make " in text or text.startswith("--"):
        for option in re.findall(r"(?:^|\s|\[)(--[a-z][a-z-]+)", text):
            if option not in FOREIGN_OPTIONS and option not in project.source:
                faults.append(f"no option {option}")
    return faults


def yaml_faults(project: Project, text: str) -> list[str]:
    """Keys of a YAML block that is a config or a part of one."""
    data = yaml.safe_load(text)
    if not isinstance(data, dict) or not set(data) & project.sections:
        return []
    faults = []
    for section, values in data.items():
        if section in project.sections and isinstance(values, dict):
            for key in values:
                faults += dotted_faults(project, f"{section}.{key}", section)
    return faults
