"""The GPU probe: its sections at tiny sizes on a CPU."""

from __future__ import annotations

import os

import pytest

from benchmarks.gpu import TINY
from benchmarks.gpu_probe import SECTIONS, Section, probe, row_kernels
from megatron_gspo import kernels
from megatron_gspo.errors import InputError


def test_every_section_is_measured() -> None:
    sections = dict(probe(list(SECTIONS), TINY, peak=0.5))
    assert list(sections) == ["ceilings", "rows", "switches", "head", "profile"]
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
    for name in (*kernels.NAMES, "varlen attention"):
        measured = sections["switches"][f"without {name}"]
        assert [row["name"] for row in measured] == ["layer", "training step"]
    assert {"0.25", "1", "4", "16"} <= set(sections["head"])
    for entries in (sections["profile"]["head"], sections["profile"]["training step"]):
        times = [entry["milliseconds"] for entry in entries]
        assert times == sorted(times, reverse=True) and times[0] > 0


def test_a_section_that_fails_or_takes_too_long_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(sizes, peak):
        yield "first", 1.0
        raise ValueError("no")

    monkeypatch.setitem(SECTIONS, "rows", Section(breaks, 60))
    monkeypatch.setitem(SECTIONS, "head", Section(breaks, 0))
    seen = [name for name, _ in probe(["rows", "head", "ceilings"], TINY, peak=None)]
    assert seen == 2 * ["rows"] + 2 * ["head"] + 4 * ["ceilings"]
    sections = dict(probe(["rows", "head", "ceilings"], TINY, peak=None))
    assert sections["rows"]["first"] == 1.0 and sections["rows"]["failed"] == "ValueError: no"
    assert sections["head"]["stopped"] == "after 0 s" and "failed" not in sections["head"]
    assert sections["ceilings"]["product_tflops"] > 0


def test_the_switch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    with row_kernels("-adam,-logits"):
        assert kernels.turned_off() == {"adam", "logits"}
    assert kernels.SWITCH not in os.environ and not kernels.turned_off()
    monkeypatch.setenv(kernels.SWITCH, "0")
    with row_kernels("1"):
        assert not kernels.turned_off()
    assert kernels.turned_off() == set(kernels.NAMES)


@pytest.mark.parametrize("value", ["-adams", "adam", "-adam,", ""])
def test_an_unknown_name_is_refused(value: str) -> None:
    with row_kernels(value), pytest.raises(InputError, match="-adam,-embedding_gradient"):
        kernels.turned_off()
