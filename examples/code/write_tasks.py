"""Write small programming tasks, demonstrations with mistakes and a random model, for the two
configs of this folder.

    python examples/code/write_tasks.py runs/code

A prompt is a list of steps, `add 3, times 2:`; the program reads an integer and prints the result.
train.jsonl and held_out.jsonl have three test cases per prompt; demonstrations.jsonl has programs
in which 12 % of the characters of the expression are wrong.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from random import Random

from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

SYMBOLS = {"add": "+", "subtract": "-", "times": "*"}
START = "n = int(input())\nprint("
MISTAKES = 0.12
TRAINING = 8000
HELD_OUT = 100

Step = tuple[str, int]


def program(steps: tuple[Step, ...]) -> str:
    """The right program: the steps in their order, with brackets where the order needs them."""
    expression = "n"
    for word, number in steps:
        if word == "times" and expression[-2:-1] in ("+", "-"):
            expression = f"({expression})"
        expression += f"{SYMBOLS[word]}{number}"
    return f"{START}{expression})"


def result(steps: tuple[Step, ...], n: int) -> int:
    """What the steps make of n."""
    for word, number in steps:
        n = {"add": n + number, "subtract": n - number, "times": n * number}[word]
    return n


def mistyped(text: str, random: Random) -> str:
    """The program with mistakes in what follows its start."""
    characters = "n()+-*23456789"
    rest = text.removeprefix(START)
    return START + "".join(
        random.choice(characters) if random.random() < MISTAKES else c for c in rest
    )


def main(folder: Path) -> None:
    """Write model/ and the three files."""
    random = Random(0)
    steps = list(product(SYMBOLS, range(2, 10)))
    tasks = [*product(steps, repeat=2), *product(steps, repeat=3)]
    random.shuffle(tasks)
    rows = []
    demonstrations = []
    for task in tasks[: TRAINING + HELD_OUT]:
        prompt = ", ".join(f"{word} {number}" for word, number in task) + ":"
        tests = [
            {"input": f"{n}\n", "output": f"{result(task, n)}\n"}
            for n in random.sample(range(10, 100), 3)
        ]
        rows.append({"prompt": prompt, "answer": program(task), "tests": tests})
        demonstrations.append({"prompt": prompt, "answer": mistyped(program(task), random)})
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (
        ("held_out", rows[:HELD_OUT]),
        ("train", rows[HELD_OUT:]),
        ("demonstrations", demonstrations[HELD_OUT:]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    words = [START, *(f"{word} " for word in SYMBOLS), ", "]
    write_tiny_model(folder / "model", TinyModel(expert_width=64), words=words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
