"""Extracts the final answer from a response."""

from __future__ import annotations

import re

STYLES = ("whole", "tag", "boxed", "hash")


def extract_answer(text: str, style: str = "whole") -> str | None:
    """The answer, stripped, or None if the response has none in that style.

    style: "whole" (all of the text), "tag" (last <answer>...</answer>), "boxed" (last \\boxed{...}, braces
        balanced), "hash" (what follows the last ####, on its line).
    Raises ValueError for another style.
    """
    if style == "whole":
        return text.strip()
    if style == "tag":
        found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, flags=re.DOTALL)
        return found[-1].strip() if found else None
    if style == "boxed":
        return _last_boxed(text)
    if style == "hash":
        _, mark, rest = text.rpartition("####")
        return rest.strip().split("\n")[0].strip() if mark else None
    raise ValueError(f"answer style {style!r} is unknown; use one of {', '.join(STYLES)}")


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        first = start + len("\\boxed{")
        for at in range(first - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[first:at].strip()
        start = text.rfind("\\boxed{", 0, start)  # unbalanced (cut off): try the one before
    return None
