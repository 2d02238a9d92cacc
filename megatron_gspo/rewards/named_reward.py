"""Rewards that say why a response has them."""

from __future__ import annotations

VERDICTS = {
    "code": (
        "passed",
        "wrong_answer",
        "runtime_error",
        "time_limit",
        "output_limit",
        "compile_error",
        "no_program",
    )
}
"""Names of `NamedReward`s by verifier: why a response has its reward. Counted as metrics."""


class NamedReward(float):
    """A reward with the name of its reason, one of `VERDICTS`."""

    name: str

    def __new__(cls, reward: float, name: str) -> NamedReward:
        named = super().__new__(cls, reward)
        named.name = name
        return named
