"""Layouts of public evaluation files, recognised by the fields of a row.

| layout | fields; further ones that are read | verifier |
| --- | --- | --- |
| livecodebench | `question_content`, `public_test_cases`; `private_test_cases`, `contest_date` and others | `code` |
| codeforces | `contest_id`, `index`, `description`, `official_tests`; `contest_start` and others | `code` |
| plain | `data.prompt_key`, `data.answer_key`; any further fields | `data.verifier` |
| math | `problem` or `question` and `answer`, or capitalised (AIME 2024 and 2025) | `math_verify` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Row = Mapping[str, Any]
LANGUAGES = {"python": "Python", "cpp": "C++"}


class LeftOut(Exception):
    """A row that can't be scored; the message is the reason."""


@dataclass(frozen=True)
class Layout:
    """fields: a row that has them all has this layout. verifier: None is the config's. has_answer:
    whether rows have a reference answer. read: the row (and the language of programs) as a row with
    `prompt`, `answer` and what the verifier reads; raises `LeftOut`. None: the row as it is. date:
    of the problem, if it has one.
    """

    name: str
    fields: tuple[str, ...]
    verifier: str | None = None
    has_answer: bool = False
    read: Callable[[Row, str], dict[str, Any]] | None = None
    date: Callable[[Row], datetime | None] = lambda row: parse_date(row.get("contest_date"))


def layout_of(fields: Iterable[str], prompt_key: str) -> Layout:
    """The layout of rows with these fields; plain if no other has them."""
    names = set(fields)
    plain = Layout("plain", (prompt_key,))
    known = (_LIVECODEBENCH, _CODEFORCES, plain, *_MATH)
    return next((layout for layout in known if names.issuperset(layout.fields)), plain)


def parse_date(value: Any) -> datetime | None:
    """An ISO date or time, seconds since 1970, or a `datetime`; without its time zone. None for
    None.

    Raises ValueError for another value.
    """
    if value is None or isinstance(value, datetime):
        return value if value is None else value.replace(tzinfo=None)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return datetime.fromtimestamp(value, UTC).replace(tzinfo=None)
    return datetime.fromisoformat(str(value).removesuffix("Z")).replace(tzinfo=None)


def _livecodebench(row: Row, language: str) -> dict[str, Any]:
    starter = str(row.get("starter_code") or "").strip()
    if starter:
        question = (
            f"{row['question_content']}\n\nComplete this code:\n\n```{language}\n{starter}\n```"
        )
        return dict(row, prompt=f"{question}\n\n{_reply(language)}")
    return dict(row, prompt=f"{row['question_content']}\n\n{_reply(language)} {_STDIO}")


def _codeforces(row: Row, language: str) -> dict[str, Any]:
    """Problems that are interactive, accept several outputs or read files can't be scored by
    comparing outputs, and a wrong program may pass tests of which the file lacks some."""
    if row.get("interaction_format"):
        raise LeftOut("interactive")
    if row.get("generated_checker"):
        raise LeftOut("needs a checker")
    if (row.get("input_mode") or "stdio") != "stdio":
        raise LeftOut("reads a file")
    if not row.get("official_tests"):
        raise LeftOut("no tests")
    if row.get("official_tests_complete") is False:
        raise LeftOut("incomplete tests")
    parts = [row.get("title"), row["description"]]
    parts += [f"{head}\n{row[key]}" for head, key in _SECTIONS if row.get(key)]
    parts += [
        f"Example\nInput:\n{each['input']}\nOutput:\n{each['output']}"
        for each in row.get("examples") or ()
    ]
    question = "\n\n".join(str(part).strip() for part in parts if part)
    limits = f"Limits: {row['time_limit']:g} s. " if row.get("time_limit") else ""
    return dict(row, prompt=f"{question}\n\n{limits}{_reply(language)} {_STDIO}")


_SECTIONS = (("Input", "input_format"), ("Output", "output_format"), ("Note", "note"))
_STDIO = "It reads standard input and writes to standard output."


def _reply(language: str) -> str:
    return f"Reply with the whole {LANGUAGES[language]} program in one ```{language} block."


def _math(question: str, answer: str) -> Layout:
    def read(row: Row, language: str) -> dict[str, Any]:
        return dict(row, prompt=row[question], answer=row[answer])

    return Layout("math", (question, answer), "math_verify", True, read)


_LIVECODEBENCH = Layout(
    "livecodebench", ("question_content", "public_test_cases"), "code", False, _livecodebench
)
_CODEFORCES = Layout(
    "codeforces",
    ("contest_id", "index", "description", "official_tests"),
    "code",
    False,
    _codeforces,
    lambda row: parse_date(row.get("contest_start")),
)
_MATH = (
    _math("problem", "answer"),
    _math("question", "answer"),
    _math("Problem", "Answer"),
    _math("Question", "Answer"),
)
