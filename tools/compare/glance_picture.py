"""The charts that the report shows first as one SVG file, for a README; light and dark as its viewer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron_gspo.tools.html_page import render_page
from megatron_gspo.tools.svg_panel import COLOURS

TEMPLATE = "compare/glance.svg"

_COLUMNS = 2
_GAP, _LEGEND = 12.0, 30.0  # points, between charts, and of the legend's first line above them
_LINE = 18.0  # of each further line of the legend
_LETTER, _CHIP = 7.0, 36.0  # width of a letter of the legend, and of all else of an entry


def glance_picture(title: str, labels: Sequence[str], charts: Sequence[str]) -> str:
    """The file's text; empty without charts. labels: of the variants, in the order of their colours; none for charts
    that name them. charts: SVGs of one size."""
    if not charts:
        return ""
    width, height = _size(charts[0])
    rows = -(-len(charts) // _COLUMNS)
    whole = _GAP + min(_COLUMNS, len(charts)) * (width + _GAP)
    legend = _legend(labels, whole)
    top = _LEGEND + max(entry["line"] for entry in legend) * _LINE if legend else _GAP
    placed = [
        {"svg": svg, "width": width, "height": height, "x": _GAP + place % _COLUMNS * (width + _GAP),
         "y": top + place // _COLUMNS * (height + _GAP)}
        for place, svg in enumerate(charts)
    ]  # fmt: skip
    return render_page(TEMPLATE, {
        "title": title, "charts": placed, "legend": legend, "line": _LINE, "width": whole,
        "height": top + rows * (height + _GAP),
    })  # fmt: skip


def _size(svg: str) -> tuple[float, float]:
    """Width and height of a chart in points."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    return float(box.group(1)), float(box.group(2))


def _legend(labels: Sequence[str], width: float) -> list[dict[str, Any]]:
    """Label, colour and place of each variant, in as many lines as fit the width."""
    entries: list[dict[str, Any]] = []
    x, line = 2 * _GAP, 0
    for number, label in enumerate(labels):
        wide = _CHIP + _LETTER * len(label)
        if x + wide > width and x > 2 * _GAP:
            x, line = 2 * _GAP, line + 1
        entries.append({"label": label, "x": x, "line": line, "colour": str(number % COLOURS)})
        x += wide
    return entries
