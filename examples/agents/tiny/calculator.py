"""Questions for the calculator, and a teacher that makes mistakes."""

from __future__ import annotations

import json
import operator
import re
from random import Random

DEMONSTRATED = 800  # tasks
WRONG_DIGIT = 0.05
WRONG_SIGN = 0.1
MISSING_STEP = 0.2  # the first result is the answer

RESULTS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def row(random: Random) -> dict[str, str]:
    """A question with two steps, such as "(17 + 25) * 3"."""
    left = random.randint(10, 99)
    right = random.randint(10, left)
    last = random.randint(2, 9)
    first_sign = random.choice("+-")
    second_sign = random.choice("+*")
    answer = RESULTS[second_sign](RESULTS[first_sign](left, right), last)
    return {
        "prompt": f"What is ({left} {first_sign} {right}) {second_sign} {last}?",
        "answer": str(answer),
    }


def reply(prompt: str, random: Random) -> str:
    """What the teacher replies to the messages."""
    question = re.findall(r"\((\d+) (.) (\d+)\) (.) (\d+)", prompt)[-1]
    left, first_sign, right, second_sign, last = question
    results = re.findall(r"<tool_response>\n(.*)\n", prompt)
    if not results:
        return call(left, first_sign, right, random)
    if len(results) == 1 and random.random() >= MISSING_STEP:
        return call(results[0], second_sign, last, random)
    return copied(results[-1], random)


def call(left: str, sign: str, right: str, random: Random) -> str:
    """A call of the tool."""
    if random.random() < WRONG_SIGN:
        sign = random.choice("+-*")
    arguments = {
        "left": int(copied(left, random)),
        "operator": sign,
        "right": int(copied(right, random)),
    }
    body = json.dumps({"name": "calculate", "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def copied(number: str, random: Random) -> str:
    """A number, perhaps with other digits."""
    return "".join(
        random.choice("0123456789") if c.isdigit() and random.random() < WRONG_DIGIT else c
        for c in number
    )
