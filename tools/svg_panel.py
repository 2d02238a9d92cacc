"""Charts as inline SVG, drawn with matplotlib and coloured by the page's CSS variables
(``page_colours.css``).

matplotlib writes plain colours; each of the placeholders below becomes `var(--name)`, so that one
drawing serves the light and the dark page.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = 16  # of variants; more start over
_PLACEHOLDERS = {f"#{0xA1B200 + i:06x}": f"v{i}" for i in range(COLOURS)} | {
    f"#{0xA1B300 + i:06x}": f"p{i}" for i in range(10)
}
TEXT, GRID, FAINT = "#a1b400", "#a1b401", "#a1b402"
_PLACEHOLDERS |= {TEXT: "text", GRID: "grid", FAINT: "faint"}
# Inches; two panels beside each other are read at 400 pixels, where 9.5 points are 7 pixels.
_SIZE = (3.4, 2.4)
_TITLE_LETTERS = 34  # of a title's line
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "comparison",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.parse_math": False,  # labels are names of people: a dollar is a dollar
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": TEXT,
    "text.color": TEXT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "grid.color": GRID,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


def variant_colour(number: int) -> str:
    return f"#{0xA1B200 + number % COLOURS:06x}"


def phase_colour(number: int) -> str:
    return f"#{0xA1B300 + number % 10:06x}"


def short(value: float, _: Any = None) -> str:
    """12,000 as 12k; 1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


@contextmanager
def panel(title: str, size: tuple[float, float] = _SIZE) -> Iterator[tuple[Axes, list[str]]]:
    """An axis to draw on; afterwards the second value holds the SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    output: list[str] = []
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title or "panel"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        yield axis, output
        if title:
            lines = "\n".join(textwrap.wrap(title, _TITLE_LETTERS))
            axis.set_title(lines, fontsize=10.5, loc="left", fontweight="bold")
        figure.patch.set_alpha(0)
        axis.patch.set_alpha(0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    output.append(_for_page(buffer.getvalue(), title))


def _for_page(svg: str, title: str) -> str:
    """Without prologue, metadata, ids and fixed sizes; colours as CSS variables; rounded to a
    tenth of a point.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    name = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    link = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg {link} {box.group(0) if box else ""} role="img" aria-label="{name}"'
    rest = re.sub(r'<g id="(v-\d+)"', r'<g class="\1"', rest)
    rest = re.sub(r'<g id="[^"]*"', "<g", rest)
    for colour, variable in _PLACEHOLDERS.items():
        rest = rest.replace(colour, f"var(--{variable})")
    rest = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", rest)
    rest = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", _rounded, tag.group()), rest)
    return head + ">" + re.sub(r"\s*\n\s*", " ", rest).strip()


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number.group()):.1f}".removesuffix(".0")
