"""Tasks with small files, and a teacher that makes mistakes."""

from __future__ import annotations

import json
import re
from random import Random

DEMONSTRATED = 500  # tasks
WRONG_DIGIT = 0.1
MISSING_STEP = 0.3  # submits without having written

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def row(random: Random) -> dict[str, str]:
    """A number in one of three files, which belongs into another one."""
    source, *others, target = random.sample(range(10, 100), 4)
    number = random.randint(1000, 9999)
    files = {source: number} | {name: random.randint(1000, 9999) for name in others}
    return {
        "prompt": f"Copy the number in {source}.txt to {target}.txt.",
        "setup": "; ".join(f"echo {files[name]} > {name}.txt" for name in sorted(files)),
        "test": f"grep -qx {number} {target}.txt",
    }


def reply(prompt: str, random: Random) -> str:
    """What the teacher replies to the messages."""
    source, target = re.findall(r"the number in (\d+)\.txt to (\d+)\.txt", prompt)[-1]
    seen = re.findall(r'"output": "(\d+)', prompt)
    if not seen:
        return call(f"cat {copied(source, random)}.txt")
    if '"command": "echo' in prompt or random.random() < MISSING_STEP:
        return call(SUBMIT)
    return call(f"echo {copied(seen[-1], random)} > {copied(target, random)}.txt")


def call(command: str) -> str:
    """A call of the tool."""
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{body}\n</tool_call>"


def copied(number: str, random: Random) -> str:
    """A number, perhaps with other digits."""
    return "".join(
        random.choice("0123456789") if random.random() < WRONG_DIGIT else digit for digit in number
    )
