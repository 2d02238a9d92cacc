"""The charts that the report shows first as one SVG file, for a README; light and dark as its viewer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_gspo.tools.html_page import render_page
from megatron_gspo.tools.svg_panel import COLOURS

TEMPLATE = "compare/glance.svg"

_COLUMNS = 2
_GAP, _LEGEND = 12.0, 30.0  # points, between charts and above them
_LETTER, _CHIP = 7.0, 36.0  # width of a letter of the legend, and of all else of an entry


def glance_picture(title: str, labels: Sequence[str], charts: Sequence[str]) -> str:
    """The file's text; empty without charts. labels: of the variants, in the order of their colours. charts: SVGs of
    one size."""
    if not charts:
        return ""
    width, height = _size(charts[0])
    rows = -(-len(charts) // _COLUMNS)
    placed = [
        {"svg": svg, "width": width, "height": height, "x": _GAP + place % _COLUMNS * (width + _GAP),
         "y": _LEGEND + place // _COLUMNS * (height + _GAP)}
        for place, svg in enumerate(charts)
    ]  # fmt: skip
    return render_page(TEMPLATE, {
        "title": title, "charts": placed, "legend": _legend(labels),
        "width": _GAP + min(_COLUMNS, len(charts)) * (width + _GAP), "height": _LEGEND + rows * (height + _GAP),
    })  # fmt: skip


def _size(svg: str) -> tuple[float, float]:
    """Width and height of a chart in points."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    return float(box.group(1)), float(box.group(2))


def _legend(labels: Sequence[str]) -> list[dict[str, str | float]]:
    entries: list[dict[str, str | float]] = []
    x = 2 * _GAP
    for number, label in enumerate(labels):
        entries.append({"label": label, "x": x, "colour": str(number % COLOURS)})
        x += _CHIP + _LETTER * len(label)
    return entries
