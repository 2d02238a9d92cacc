"""Environments for the tests, by name: `tests/support/example_environments.py:countdown`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_gspo.environments.environment import Turn


class Countdown:
    """Ends after so many responses; worth the number of responses so far. Observes the length
    of the last response.
    """

    def __init__(self, turns: int, log: str | None) -> None:
        self.turns = turns
        self.taken = 0
        self.log = log

    def step(self, response: str) -> Turn:
        self.taken += 1
        self.note(f"step {self.taken} {response}")
        if response == "raise":
            raise ValueError("a bad answer")
        if response == "hang":
            time.sleep(60)
        if response == "die":
            os._exit(3)
        if response == "wrong":
            return Turn(reward=float("nan"))
        return Turn(f"<{len(response)}>", float(self.taken), self.taken == self.turns)

    def note(self, what: str) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(what + "\n")

    def close(self) -> None:
        self.note("closed")


def countdown(prompt, *, sample_index, seed, turns=3, log=None):
    """The episode of sample i has `turns + i` turns."""
    made = Countdown(turns + sample_index, log)
    made.note(f"made {prompt.index}/{sample_index}")
    return made


def stranger(prompt, *, sample_index, seed):
    class Stranger:
        def step(self, response):
            return {
                "none": None,
                "text": "no",
                "word": Turn(observation=3),
                "done": Turn(done="yes"),
            }[response]

    return Stranger()


NOT_A_FUNCTION = 3
