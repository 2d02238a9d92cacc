"""Pages and pictures from the templates of this folder's packages, which share
``page_head.html`` and its style.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def render_page(template: str, context: Mapping[str, Any]) -> str:
    """The text of a page. template: its file, such as ``compare/report.html``. Raises
    ImportError without jinja2.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megatron_gspo.tools", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**context)
