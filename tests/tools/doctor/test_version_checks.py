"""Versions: the supported ranges are setup.py's; findings about others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_gspo.tools.doctor.version_checks import (
    SERVERS,
    SUPPORTED,
    judge_accelerator,
    judge_version,
)

SETUP = (Path(__file__).parents[3] / "setup.py").read_text()
BY_NAME = {support.name: support for support in SUPPORTED}


def test_ranges_are_those_of_the_installation():
    asked = dict(re.findall(r'"([a-z0-9-]+)(?:\[\w+\])?([<>=][^"]*)"', SETUP))
    for support in (*SUPPORTED[1:], *SERVERS.values()):
        if support.needs:
            assert asked[support.name] == support.needs, support.name
    assert re.search(r'python_requires="(.*)"', SETUP)[1] == BY_NAME["python"].needs


@pytest.mark.parametrize(
    "name, version, level, says",
    [
        ("megatron-core", "0.16.1", "ok", ">=0.16.1, <0.20"),
        ("megatron-core", "0.19.3", "note", "newer than any that the tests have run on (0.19.2)"),
        ("megatron-core", "0.20.0", "error", "install megatron-core>=0.16.1,<0.20"),
        ("megatron-core", "0.15.2", "error", "not supported"),
        ("megatron-core", None, "error", "pip install 'megatron-core>=0.16.1,<0.20'"),
        ("megatron-core", "main-a1b2", "warning", "no version that can be compared"),
        ("torch", "2.10.0+cu128", "error", "not supported"),
        ("transformer-engine", None, "note", "the torch implementations do its work"),
        ("transformer-engine", "2.3.0", "warning", "not supported"),
    ],
)
def test_one_version(name, version, level, says):
    finding = judge_version(BY_NAME[name], version, gpu=True)
    assert (finding.level, finding.check) == (level, f"versions.{name}")
    assert says in finding.line
    assert finding.line.startswith(name)
    if level not in ("ok", "note"):
        assert finding.why and finding.fix


@pytest.mark.parametrize(
    "build, devices, nccl, levels, says",
    [
        (None, [], None, ["note"], "CPU build"),
        ("12.8", [], None, ["note"], "finds no GPU"),
        ("12.8", ["H200", "H200"], "2.27.3", ["ok", "ok"], "2 x H200"),
        ("12.8", ["H200"], None, ["ok", "error"], "has no NCCL"),
    ],
)
def test_accelerator(build, devices, nccl, levels, says):
    findings = judge_accelerator(build, devices, nccl)
    assert [f.level for f in findings] == levels
    assert any(says in f.line for f in findings)
