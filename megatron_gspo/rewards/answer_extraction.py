"""Extracts the final answer from a response, and compares answers as texts or numbers."""

from __future__ import annotations

import re
from decimal import Decimal

STYLES = ("whole", "tag", "boxed", "hash")

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"\\[^$\n]+|[^\s{}$]+")
# GSM8K's own pattern, with a currency sign; not a part of a longer number or a fraction
_NUMBER_AFTER_HASH = re.compile(r"[-+\u2212]?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)(?![\d/^])")
# digits with or without thousands separators; a leading zero makes a code of it, as in 007
_NUMBER = re.compile(
    r"[-+]?(?:(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
)


def extract_answer(text: str, style: str = "whole") -> str | None:
    """The answer, stripped, or None if the response has none in that style.

    style: "whole" (all of the text), "tag" (last <answer>...</answer>), "boxed" (last \\boxed{...}
        or \\fbox{...} that is not empty, braces balanced; also \\boxed 5), "hash" (what follows the
        last ####, on its line).
    Raises ValueError for another style.
    """
    if style == "whole":
        return text.strip()
    if style == "tag":
        tagged = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, flags=re.DOTALL)
        return tagged[-1].strip() if tagged else None
    if style == "boxed":
        return _last_boxed(text)
    if style == "hash":
        _, mark, rest = text.rpartition("####")
        return rest.strip().split("\n")[0].strip() if mark else None
    raise ValueError(f"answer style {style!r} is unknown; use one of {', '.join(STYLES)}")


def equal_answers(answer: str, reference: str, style: str = "whole") -> bool:
    """Whether two answers are the same number ("72" and "72.0", "1,234" and "1234"), the same of
    true and false in any case, or the same text.

    style: "hash" compares a number with the start of the answer, as GSM8K's own scorer does:
    "$1,234 in all" is 1234.
    """
    if answer == reference:
        return True
    if reference.lower() in ("true", "false"):
        return answer.lower() == reference.lower()
    if style == "hash":
        reference = reference.replace("$", "")
        leading = _NUMBER_AFTER_HASH.match(answer)
        answer = leading[0].replace("$", "") if leading else answer
    number = _number(answer)
    return number is not None and number == _number(reference)


def _number(text: str) -> Decimal | None:
    text = text.replace("\u2212", "-")  # the minus sign of typography
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _last_boxed(text: str) -> str | None:
    for box in reversed(list(_BOX.finditer(text))):
        if text.startswith("{", box.end()):
            # None for one that was cut off: the one before counts.
            content = _braced(text, box.end())
        else:
            unbraced = _UNBRACED.match(text, box.end())
            content = unbraced[0].rstrip(".,;") if unbraced else None
        if content and content.strip():
            return content.strip()
    return None


def _braced(text: str, start: int) -> str | None:
    """What is between the brace at `start` and its closing one.

    Escaped braces are characters of the answer.
    """
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text[start:], flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0 and token[0] == "}":
            return text[start + 1 : start + token.start()]
    return None
