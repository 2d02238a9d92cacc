"""Areas add up to the memory of each point; phases and peak are where the timeline has them."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from megatron_gspo.tools.plan.hardware import GIB
from megatron_gspo.tools.rehearse.memory_chart import draw_memory, draw_png, phase_spans
from megatron_gspo.tools.rehearse.records import KINDS
from tests.tools.rehearse.handmade import memory, point, record

POINTS = (
    point(0, "build", weights=GIB),
    point(10, "forward_backward", weights=GIB, activations=3 * GIB),
    point(30, "forward_backward", weights=GIB, activations=GIB),
    point(40, "optimizer", weights=GIB, optimizer=GIB),
)


def test_phases_span_their_operations():
    assert phase_spans(POINTS) == [
        ("build", 0, 10),
        ("forward_backward", 10, 40),
        ("optimizer", 40, 40),
    ]


def test_areas_are_stacked_to_the_total():
    axis = Figure().subplots()
    draw_memory(axis, record(memory=memory(*POINTS)))
    assert [area.get_label() for area in axis.collections] == list(KINDS)
    top = axis.collections[-1].get_paths()[0].vertices
    assert top[:, 1].max() == pytest.approx(4.0)
    at_end = [path.get_paths()[0].vertices[:, 1].max() for path in axis.collections[:1]]
    assert at_end == [pytest.approx(1.0)]  # weights are at the bottom
    assert any(text.get_text() == "4.00 GiB" for text in axis.texts)
    names = [text.get_text() for text in axis.texts]
    # Too narrow for its name.
    assert "forward, backward" in names and "build" in names and "optimizer" not in names


def test_a_sheet_of_several_ranks(tmp_path):
    picture = draw_png(
        [record(0, memory=memory(*POINTS)), record(1), record(2)], tmp_path / "memory.png"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
