"""The files of the repository agree with each other: paths in scripts exist, versions are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_gspo import __version__
from tests.structure.citations import Project

PROJECT = Project(Path(__file__).resolve().parents[2])
SCRIPTS = ("Makefile", ".ci/run", ".pre-commit-config.yaml", ".github/workflows/ci.yml", "pyproject.toml", "setup.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_paths_and_modules_of_a_script_exist(script: str):
    text = (PROJECT.root / script).read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w./-])((?:tests|tools|benchmarks|docs|examples|megatron_gspo|\.ci)/[\w./-]+)", text)
    modules = re.findall(r"-m ((?:tests|megatron_gspo)\.[\w.]+)", text)
    assert [path for path in paths if not (PROJECT.root / path.rstrip(".")).exists()] == []
    assert [module for module in modules if not PROJECT.has_module(module)] == []


@pytest.mark.parametrize("target", re.findall(r"tests/[\w/]+\.py::\w+", (PROJECT.root / ".ci/run").read_text()))
def test_tests_that_ci_names_exist(target: str):
    file, _, function = target.partition("::")
    assert f"def {function}(" in (PROJECT.root / file).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((PROJECT.root / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__


def test_the_support_page_names_the_range_of_setup():
    setup = (PROJECT.root / "setup.py").read_text(encoding="utf-8")
    page = (PROJECT.root / "docs" / "support.md").read_text(encoding="utf-8")
    least_of = {"Python": 'python_requires=">=', "torch": "torch>=", "megatron-core": "megatron-core>="}
    for package, least in (least_of | {"Transformers": "transformers>="}).items():
        version = re.search(re.escape(least) + r"([\d.]+)", setup)
        assert version and re.search(rf"^\| {package} \| {re.escape(version[1])}\b", page, re.MULTILINE), package


def test_the_workflow_has_a_job_for_each_part_of_the_local_script():
    workflow = yaml.safe_load((PROJECT.root / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    script = (PROJECT.root / ".ci/run").read_text(encoding="utf-8")
    [parts] = re.findall(r"^PARTS=\(([\w ]+)\)$", script, re.MULTILINE)
    assert workflow["jobs"]["part"]["strategy"]["matrix"]["part"] == parts.split()
