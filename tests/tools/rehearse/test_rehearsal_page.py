"""The page needs no other file, has a chart of each rank, and is coloured by its own style sheet."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from megatron_gspo.tools.rehearse.rehearsal_page import render
from megatron_gspo.tools.rehearse.summary import CANNOT_PROVE, FailedRank
from tests.tools.rehearse.handmade import memory, point, record, rehearsal


def page_of_two() -> str:
    timeline = memory(point(0, "build", weights=8), point(9, activations=4, weights=8), point(12, weights=8))
    return render(rehearsal(*(record(rank, world=2, memory=timeline, roles=(f"role <{rank}>",)) for rank in (0, 1))))


def test_the_page_stands_alone():
    page = page_of_two()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page) and "@import" not in page
    assert set(re.findall(r"var\(--(\w+)\)", page)) <= set(re.findall(r"--(\w+):", page))
    assert "role &lt;0&gt;" in page and "role <0>" not in page
    assert all(line.replace("'", "&#39;") in page for line in CANNOT_PROVE)


def test_every_rank_has_a_chart():
    drawings = re.findall(r"<svg.*?</svg>", page_of_two(), flags=re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_problems_take_the_place_of_the_verdict():
    failing = replace(rehearsal(record()), failed=(FailedRank(1, "unknown operation aten.fft"),))
    assert '<p class="good">' in page_of_two()
    page = render(failing)
    assert "unknown operation aten.fft" in page and '<p class="good">' not in page
