"""A panel is XML in the colours of the page."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import megatron_gspo.tools
from megatron_gspo.tools.svg_panel import COLOURS, panel, phase_colour, short, variant_colour


def test_colours_become_the_pages_variables():
    with panel("0.12345 & more") as (axis, output):
        axis.plot([0.0, 1.0 / 3], [0.0, 1.0], color=variant_colour(1), gid="v-1")
        axis.fill_between([0.0, 1.0], [0.0, 1.0], color=phase_colour(2))
    (drawing,) = output
    ElementTree.fromstring(drawing)
    assert 'aria-label="0.12345 &amp; more"' in drawing and 'class="v-1"' in drawing
    assert {"var(--v1)", "var(--p2)", "var(--text)", "var(--grid)"} <= set(
        re.findall(r"var\(--\w+\)", drawing)
    )
    assert not re.search(r"#a1b[234]", drawing)
    assert not re.search(r' d="[^"]*\d\.\d\d', drawing)


def test_every_variant_of_the_largest_comparison_has_a_colour_of_its_own_in_both_themes():
    css = (Path(megatron_gspo.tools.__path__[0]) / "page_colours.css").read_text(encoding="utf-8")
    colours = re.findall(r"--v(\d+): (#\w{6});", css)
    assert [int(number) for number, _ in colours] == 2 * list(range(COLOURS)) and COLOURS >= 16
    for theme in (colours[:COLOURS], colours[COLOURS:]):
        assert len({colour for _, colour in theme}) == COLOURS


def test_short_numbers():
    assert [short(value) for value in (0.5, 999.0, 12_000.0, 1_500_000.0, 2e9)] == [
        "0.5",
        "999",
        "12k",
        "1.5M",
        "2G",
    ]
