"""Small files of the layouts of the public data sets, made for the tests."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

AIME = [  # HuggingFaceH4/aime_2024
    {
        "id": 60,
        "problem": "What is 12 + 13?",
        "solution": "Add.",
        "answer": "025",
        "url": "",
        "year": "2024",
    },
    {
        "id": 61,
        "problem": "What is 200 + 4?",
        "solution": "Add.",
        "answer": "204",
        "url": "",
        "year": "2024",
    },
]
AIME_2025 = [{"question": "What is 7 times 10?", "answer": "70"}]  # opencompass/AIME2025
CAPITALISED = [{"ID": "2024-II-4", "Problem": "What is 30 + 3?", "Solution": "Add.", "Answer": 33}]


def packed(content: Any) -> str:
    """LiveCodeBench's private tests: base64 of zlib of a pickled JSON text."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(content)))).decode()


def livecodebench(
    date: str, private: list[dict[str, str]], starter: str = "", name: str = ""
) -> dict[str, Any]:
    """A row of livecodebench/code_generation_lite; its first private test is its public one too."""
    return {
        "question_title": "Double",
        "question_content": "Print twice the number.",
        "platform": "atcoder",
        "question_id": f"q_{date}",
        "contest_id": "abc",
        "contest_date": date,
        "starter_code": starter,
        "difficulty": "easy",
        "public_test_cases": json.dumps(private[:1]),
        "private_test_cases": packed(private),
        "metadata": json.dumps({"func_name": name} if name else {}),
    }


def stdin_tests(*numbers: int) -> list[dict[str, str]]:
    """Tests of a program that doubles a number."""
    return [{"input": f"{n}\n", "output": f"{2 * n}\n", "testtype": "stdin"} for n in numbers]


FUNCTION = [{"input": "3", "output": "6", "testtype": "functional"}]
LIVECODEBENCH = [
    livecodebench("2024-07-01T00:00:00", stdin_tests(2, 5)),
    livecodebench("2024-08-03T07:30:00", stdin_tests(1, 8)),
    livecodebench(
        "2025-01-04T00:00:00",
        FUNCTION,
        "class Solution:\n    def double(self, n: int) -> int:",
        "double",
    ),
    livecodebench("2025-01-04T18:30:00", stdin_tests(4)),
]
DOUBLES = "Here:\n```python\nprint(2 * int(input()))\n```"
DOUBLES_CALLED = "```python\nclass Solution:\n    def double(self, n):\n        return 2 * n\n```"
PRINTS_TWO = "```python\nprint(2)\n```"


def codeforces(rating: int | None, **others: Any) -> dict[str, Any]:
    """A row of open-r1/codeforces."""
    tests = [{"input": test["input"], "output": test["output"]} for test in stdin_tests(1, 3)]
    return {
        "id": f"1/{rating}",
        "contest_id": "1",
        "contest_start": 1704067200,
        "index": "A",
        "time_limit": 1.0,
        "memory_limit": 256.0,
        "title": "Double",
        "description": "Double a number.",
        "input_format": "A number n.",
        "output_format": "Twice n.",
        "interaction_format": None,
        "note": None,
        "examples": tests[:1],
        "rating": rating,
        "official_tests": tests,
        "official_tests_complete": True,
        "input_mode": "stdio",
        "generated_checker": None,
    } | others


CODEFORCES = [
    codeforces(800),
    codeforces(1600),
    codeforces(2400),
    codeforces(None),
    codeforces(1200, generated_checker="import sys"),
    codeforces(1300, interaction_format="Ask."),
    codeforces(1400, input_mode="file"),
    codeforces(1500, official_tests=[]),
    codeforces(1700, official_tests_complete=False),
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
