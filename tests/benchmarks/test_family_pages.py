"""The pages of docs/families/ are those of their data, and their data is that of the configs."""

from __future__ import annotations

import re

import pytest

from benchmarks.family_pages import rehearsed
from benchmarks.family_pages.facts import ROOT, read_facts
from benchmarks.family_pages.page import all_pages, layouts
from benchmarks.family_pages.ready_configs import ReadyConfig, ready_configs
from benchmarks.family_pages.rehearsed import (
    read_rehearsals,
    rehearsed_of,
    setting_of,
    write_rehearsals,
)
from megatron_gspo.gpus import GIB, RUNTIME_BYTES
from megatron_gspo.models import read_config
from megatron_gspo.models.families import FAMILIES
from megatron_gspo.tools.rehearse.roles import choose_ranks
from megatron_gspo.tools.rehearse.step_figures import StepFigures
from tests.equivalence.measure import MODELS
from tests.tools.rehearse.handmade import memory, point, record

PAGES = read_facts()
CONFIGS = ready_configs()
REHEARSALS = read_rehearsals()
TEXTS = all_pages(PAGES, CONFIGS, REHEARSALS)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_page_is_that_of_its_data(path) -> None:
    assert path.read_text(encoding="utf-8") == TEXTS[path], "run python -m benchmarks.family_pages"


def test_no_other_page_lies_in_the_folder() -> None:
    assert set((ROOT / "docs" / "families").iterdir()) == set(TEXTS) - {ROOT / "docs" / "models.md"}


def test_every_family_and_every_ready_config_has_one_page() -> None:
    variants = [variant for facts in PAGES for variant in facts.variants]
    parts_of_others = {"qwen3_5_moe_text", "qwen3_5_text"}
    assert {variant.type for variant in variants} == set(FAMILIES) - parts_of_others
    names = [variant.name for variant in variants]
    assert len(names) == len(set(names))
    assert {ready.model for ready in CONFIGS} <= set(names)
    for variant in variants:
        if variant.config is not None:
            assert read_config(variant.config)["model_type"] == variant.type
    assert {model for facts in PAGES for model in facts.models} <= set(MODELS)


@pytest.mark.parametrize("name", REHEARSALS)
def test_figures_are_those_of_the_config_and_fit(name: str) -> None:
    ready = config(name)
    assert REHEARSALS[name].setting == setting_of(ready), f"{name}: rehearse it again"
    assert REHEARSALS[name].figures.peak + RUNTIME_BYTES < ready.gpu.memory
    stages = {played.rank for played in choose_ranks(ready.config.parallel, ready.world, "stages")}
    assert stages <= set(REHEARSALS[name].ranks)


def test_the_peaks_of_the_readme_are_rehearsed() -> None:
    rows = re.findall(
        r"^\| .*\(examples/\w+/(\w+)\.yaml\) \| ([\d.]+) GiB \|$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 4
    for name, peak in rows:
        if name in REHEARSALS:
            assert f"{REHEARSALS[name].figures.peak / GIB:.1f}" == peak, name


def config(name: str) -> ReadyConfig:
    return next(ready for ready in CONFIGS if ready.name == name)


def test_a_row_by_hand() -> None:
    """The fullest rank's bytes."""
    ready = config("qwen3_30b_a3b_4x8_gspo")
    records = [
        record(rank, world=16, memory=memory(point(weights=size * GIB, activations=GIB)))
        for rank, size in ((0, 7), (7, 8))
    ]
    stored = rehearsed_of(ready, records)
    assert (stored.figures.peak, stored.ranks) == (9 * GIB, (0, 7))
    row = layouts([ready], {ready.name: stored})
    assert "| 16 x 80 GB, 16 GPUs | TP2 EP8 |" in row
    assert " | 9.0 | 0 |" in row
    assert "| TP2 EP8 |  |  |  |" in layouts([ready], {})


def test_a_step_is_the_sum_of_its_parts() -> None:
    states = {"weights": 1, "gradients": 2, "optimizer": 3}
    figures = StepFigures(states, 4, 10, compute=1.0, communication=0.5, bubble=0.25)
    assert (figures.state_bytes, figures.seconds) == (6, 1.75)


def test_stored_figures_are_read_as_they_were(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rehearsed, "RESULTS", tmp_path / "rehearsals.json")
    write_rehearsals(REHEARSALS)
    assert read_rehearsals() == REHEARSALS
