"""The GPU probe: its sections at tiny sizes on a CPU."""

from __future__ import annotations

import os

import pytest

from benchmarks import gpu_probe
from benchmarks.gpu import TINY
from benchmarks.gpu_probe import SECTIONS, probe, row_kernels
from megatron_gspo import kernels


def test_every_section_is_measured() -> None:
    sections = dict(probe(list(SECTIONS), TINY, peak=0.5))
    assert list(sections) == ["ceilings", "rows", "head", "profile"]
    assert not [section["failed"] for section in sections.values() if "failed" in section]
    assert all(value > 0 for value in sections["ceilings"].values())
    by_kernels = sections["rows"]
    assert [row["name"] for row in by_kernels["with kernels"]] == [
        "matrix product",
        "head",
        "layer",
        "training step",
    ]
    assert len(by_kernels["without kernels"]) == 4
    assert {"0.25", "1", "4", "16"} <= set(sections["head"])
    for entries in (sections["profile"]["head"], sections["profile"]["training step"]):
        times = [entry["milliseconds"] for entry in entries]
        assert times == sorted(times, reverse=True) and times[0] > 0


def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(sizes, peak):
        raise ValueError("no")

    monkeypatch.setitem(gpu_probe.SECTIONS, "rows", breaks)
    sections = dict(probe(["rows", "ceilings"], TINY, peak=None))
    assert sections["rows"]["failed"] == "ValueError: no"
    assert sections["ceilings"]["product_tflops"] > 0


def test_the_switch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    with row_kernels(on=False):
        assert not kernels.are_on() and not kernels.can_compile()
    assert kernels.SWITCH not in os.environ
    monkeypatch.setenv(kernels.SWITCH, "0")
    with row_kernels(on=True):
        assert kernels.are_on()
    assert not kernels.are_on()
