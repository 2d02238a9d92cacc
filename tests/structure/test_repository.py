"""The files of the repository agree with each other: paths in scripts exist, versions are the
same.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_gspo import __version__
from tests.structure.citations import Project

PROJECT = Project(Path(__file__).resolve().parents[2])
SCRIPTS = (
    "Makefile",
    ".ci/run",
    ".pre-commit-config.yaml",
    ".github/workflows/ci.yml",
    "pyproject.toml",
    "setup.py",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_paths_and_modules_of_a_script_exist(script: str):
    text = (PROJECT.root / script).read_text(encoding="utf-8")
    paths = re.findall(
        r"(?<![\w./-])((?:tests|tools|benchmarks|docs|examples|megatron_gspo|\.ci)/[\w./-]+)", text
    )
    modules = re.findall(r"-m ((?:tests|megatron_gspo)\.[\w.]+)", text)
    assert [path for path in paths if not (PROJECT.root / path.rstrip(".")).exists()] == []
    assert [module for module in modules if not PROJECT.has_module(module)] == []


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((PROJECT.root / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__


PROMISED = ["Python", "torch", "megatron-core", "Transformers", "SGLang", "vLLM"]


def allowed_range(package: str) -> tuple[str, str]:
    """The first version that setup.py allows, and the first that it no longer does."""
    setup = (PROJECT.root / "setup.py").read_text(encoding="utf-8")
    name = 'python_requires="' if package == "Python" else f'"{package.lower()}'
    allowed = re.search(re.escape(name) + r'>=([\w.]+),<([\d.]+)"', setup)
    assert allowed, package
    return allowed[1], allowed[2]


def following(version: str, parts: int) -> str:
    """The release after a version, of the same number of parts: "2.16" after "2.15.1" for 2."""
    numbers = [int(number) for number in version.split(".")[:parts]]
    return ".".join(str(number) for number in [*numbers[:-1], numbers[-1] + 1])


@pytest.mark.parametrize("package", PROMISED)
def test_the_support_page_names_the_range_of_setup(package: str):
    page = (PROJECT.root / "docs" / "support.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {package} \| ([\w.]+)(?: to ([\d.]+))? \|", page, re.MULTILINE)
    assert row, package
    first, excluded = allowed_range(package)
    assert row[1] == first
    assert following(row[2] or row[1], excluded.count(".") + 1) == excluded


@pytest.mark.parametrize("end", ["OLDEST", "NEWEST"])
def test_the_local_script_tests_both_ends_of_the_range(end: str):
    script = (PROJECT.root / ".ci/run").read_text(encoding="utf-8")
    [python, *pins] = re.search(rf"^{end}=\((.+)\)", script, re.MULTILINE)[1].split()
    tested = dict(pin.split("==") for pin in pins) | {"Python": python}
    assert {package.lower() for package in tested} == {package.lower() for package in PROMISED[:4]}
    for package, version in tested.items():
        first, excluded = allowed_range(package)
        if end == "OLDEST":
            assert version.removesuffix(".0") == first, package
        else:
            assert following(version, excluded.count(".") + 1) == excluded, package


def test_the_workflow_has_a_job_for_each_part_of_the_local_script():
    workflow = yaml.safe_load(
        (PROJECT.root / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    )
    script = (PROJECT.root / ".ci/run").read_text(encoding="utf-8")
    [parts] = re.findall(r"^PARTS=\(([\w\s]+)\)$", script, re.MULTILINE)
    assert workflow["jobs"]["part"]["strategy"]["matrix"]["part"] == parts.split()
