"""A rehearsal as one HTML file that needs no other: the memory charts and the tables of each role."""

from __future__ import annotations

from typing import Any

from megatron_gspo.tools.html_page import render_page
from megatron_gspo.tools.rehearse.memory_chart import kind_numbers, memory_svg
from megatron_gspo.tools.rehearse.rehearsal_tables import micro_batches, overview, role_tables, same_roles
from megatron_gspo.tools.rehearse.summary import CANNOT_PROVE, Rehearsal, problems
from megatron_gspo.tools.rehearse.text_report import agreement, described, verdict


def render(rehearsal: Rehearsal) -> str:
    """The whole page as text. Raises ImportError without matplotlib or jinja2."""
    return render_page("rehearse/report.html", _context(rehearsal))


def _context(rehearsal: Rehearsal) -> dict[str, Any]:
    found, records = problems(rehearsal), rehearsal.records
    return {
        "title": f"Rehearsal of {rehearsal.config}",
        "described": described(rehearsal),
        "problems": found,
        "verdict": "" if found else verdict(rehearsal),
        "agreement": agreement(rehearsal),
        "kinds": list(kind_numbers().items()),
        "charts": [memory_svg(record) for record in records],
        "overview": overview(records),
        "sections": [
            {
                "ranks": [record.rank for record in same],
                "ran": micro_batches(same[0]),
                "tables": role_tables(same[0]),
                "notes": same[0].notes,
            }
            for same in same_roles(records)
        ],
        "cannot_prove": CANNOT_PROVE,
    }
