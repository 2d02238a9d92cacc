"""Play a training's runs as a runner of your own, here with the standard library alone.

    python examples/agents/external_runner.py RUN_DIR

The training has `agents: {external: true}`. The runner claims a run, plays it, posts its reward and
ends it, until it is interrupted. Several may work at the same time. The task is to spell a word
backward in up to three tries.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

TRIES = 3
POLL_SECONDS = 1.0  # while no run waits
LOST = (OSError, HTTPException)  # no connection, or an error as the answer

Task = dict[str, Any]


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1]) / "agents"
    while True:
        played = [play_next(file) for file in sorted(folder.glob("rank_*.json"))]
        if not any(played):
            time.sleep(POLL_SECONDS)


def play_next(address_file: Path) -> bool:
    """Whether a run of this rank waited; it is played then."""
    try:
        address = json.loads(address_file.read_text())
        task = post(f"{address['url']}/tasks/claim", address["key"])["task"]
    except LOST:  # the training has ended, or starts again with another address
        return False
    if task is None:
        return False
    try:
        with renewed(task):
            reward = spell_backward(task)
        send(task, "reward", reward=reward)
        send(task, "end")
    except LOST as error:
        print(f"run {task['index']}/{task['sample']} is lost: {error}", file=sys.stderr)
    return True


@contextlib.contextmanager
def renewed(task: Task) -> Iterator[None]:
    """Keep the run while the block works without a call."""
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(task["lease"] / 4):
            with contextlib.suppress(*LOST):
                send(task, "renew")

    threading.Thread(target=renew, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def spell_backward(task: Task) -> float:
    """1 for the right word in the first try, half for each try more; without it little, for the
    most letters in their right place."""
    messages = [{"role": "user", "content": task["prompt"]}]
    most_right = 0.0
    for number in range(TRIES):
        # openai.OpenAI(base_url=task["base_url"], api_key=task["key"]) does the same.
        completion = send(task, "chat/completions", model=task["model"], messages=messages)
        reply = completion["choices"][0]["message"]
        answer = reply["content"].strip()
        if answer == task["answer"]:
            return 0.5**number
        right = sum(a == b for a, b in zip(answer, task["answer"], strict=False))
        most_right = max(most_right, right / len(task["answer"]))
        messages += [reply, {"role": "user", "content": f"\nnot {answer}\n{task['prompt']}"}]
    return 0.1 * most_right


def send(task: Task, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a request of a run."""
    return post(f"{task['base_url']}/{path}", task["key"], **body)


def post(url: str, key: str, **body: Any) -> dict[str, Any]:
    """The JSON object that a POST is answered with. Raises one of LOST."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
