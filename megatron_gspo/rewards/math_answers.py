"""Whether a response's answer equals a reference answer, by `math-verify` and as text.

What a response boxes last is its answer; a response without a box is read by math-verify as it is.
Three things are ours: math-verify joins boxes that are near each other to one set, multiplies the
groups of numbers such as `1\\,000`, and finds no words outside of a box.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import math_verify
import sympy

from megatron_gspo.rewards.answer_extraction import extract_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;:! ]|~|[ \u00a0\u2009\u202f])\d{3})+(?!\d)")
_MIXED_NUMBER = re.compile(r"(?<![\d./^])(\d+) (\d+)/(\d+)(?![\d/])")
_CURRENCY = re.compile(
    r"^\s*[€£¥₹]\s*(?=[\d.])|(?<=\d)\s*(?:[€£¥₹]|(?:US\s+)?dollars?|euros?|USD|EUR)\s*$"
)
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}"
)
_MARKUP = re.compile(r"\\[()\[\]]|\\[,;:!]|\*\*|\$")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ ',.-])*")
_LONG_WORD = re.compile(r"[a-z]{4,}")
_ANNOUNCED = re.compile(r"answer(?:\s+is)?\s*:?\**\s*(.+)", re.IGNORECASE)
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_ANNOUNCED_CHOICE = re.compile(r"\(([A-Z])\)|([A-Z])(?![\w'])")
_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|\\\(.*\\\)|\\\[.*\\\]", re.DOTALL)


def equal_to_reference(text: str, reference: str) -> bool:
    """Whether the answer of the response `text` equals the reference answer.

    reference: an answer in LaTeX or as text, or a solution that boxes it or has it after ####.
    Raises ValueError for a reference that math-verify can't read.
    """
    boxed = extract_answer(text, "boxed")
    gold = _gold(reference)
    if _says(text, boxed, _reference_text(reference)):
        return True
    if boxed is not None and _is_long_word(boxed) and _is_long_word(reference):
        return False  # math-verify multiplies letters: "seat" would equal "east"
    answer = _parse(text) if boxed is None else _parse_latex(boxed)
    if _equal(gold, answer):
        return True
    has_several = isinstance(gold[0], (sympy.FiniteSet, sympy.Tuple)) and len(gold[0].args) > 1
    # Each in a box of its own.
    return has_several and boxed is not None and _equal(gold, _parse(text))


def _is_long_word(text: str) -> bool:
    return _LONG_WORD.fullmatch(_plain(text)) is not None


@functools.lru_cache(maxsize=1024)
def _gold(reference: str) -> list[Any]:
    answer = _reference_text(reference)
    gold = _parse(answer) if _DELIMITED.search(answer) else _parse_latex(answer)
    if not gold:
        raise ValueError(f"math-verify can't read the reference answer {reference!r}")
    return gold


def _reference_text(reference: str) -> str:
    boxed = extract_answer(reference, "boxed")
    return boxed or extract_answer(reference, "hash") or reference.strip()


def _parse_latex(answer: str) -> list[Any]:
    """An answer that is LaTeX or text as a whole."""
    answer = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), answer)
    answer = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", answer)
    answer = _CURRENCY.sub("", answer).replace("°", r"^\circ")
    return _parse(f"\\boxed{{{answer}}}")


def _parse(text: str) -> list[Any]:
    # its time limits use an alarm, which works in the main thread only; `RewardScorer(timeout=...)`
    # limits the time
    return math_verify.parse(text, parsing_timeout=None)


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    return bool(math_verify.verify(gold, answer, timeout_seconds=None))


def _says(text: str, boxed: str | None, reference: str) -> bool:
    """Whether the answer is the reference as text: words, choices such as (A), or the same
    characters.
    """
    wanted = _plain(reference)
    if not wanted:
        return False
    if boxed is not None:
        return _plain(boxed) == wanted
    if _plain(text) == wanted:
        return True
    announced = _ANNOUNCED.findall(text)
    if not announced or not _WORDS.fullmatch(wanted):
        return False
    if _CHOICE.fullmatch(choice := _without_markup(reference)):
        letter = _ANNOUNCED_CHOICE.match(_without_markup(announced[-1]))
        return letter is not None and (letter[1] or letter[2]) == choice.strip("()")
    return _plain(announced[-1]) == wanted


def _plain(text: str) -> str:
    """Without markup and final punctuation; words in lower case, a choice without its
    parentheses.
    """
    text = _without_markup(text).strip(" .,;:!")
    if _CHOICE.fullmatch(text):
        text = text.strip("()")
    return text.lower() if _WORDS.fullmatch(text) else text


def _without_markup(text: str) -> str:
    return " ".join(_MARKUP.sub("", _TEXT.sub(r"\1", text)).split())
