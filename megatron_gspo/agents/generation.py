"""What the endpoint needs of an inference engine: one reply to one prompt of token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class CallLimits:
    """Where a reply ends at the latest.

    max_tokens: at least 1. stop: a reply ends with the first token after which its text has one of
    these strings. An engine that does not know them may go on: what is behind is cut off, which
    leaves the same distribution.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A reply of r tokens to a prompt of P.

    tokens: [r] int64, r >= 1, end token included. log_probs: [r] float32 as in
    `Sample.rollout_log_probs`, or None. versions: [r] int32, of the weights that drew each token.
    finish_reason: "stop" (end token or stop string) or "length". routes: as
    `Sample.routed_experts`, of the input positions from the `routes_start` of the request to
    P + r - 2, or None. missing_routes: as many bool, or None: all are known.
    """

    tokens: np.ndarray
    log_probs: np.ndarray | None
    versions: np.ndarray
    finish_reason: str
    routes: np.ndarray | None = None
    missing_routes: np.ndarray | None = None


class Generator(Protocol):
    """Draws replies; calls run at the same time.

    The draw of token t depends on (prompt, seed, t) alone. A weight update interrupts a call, which
    continues under the new weights.
    """

    @property
    def paused_seconds(self) -> float:
        """Seconds in which calls have had to wait for the trainer, up to now."""
        ...

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        """prompt: [P] int64. seed: 62 bits, of this call alone. routes_start: first input position
        whose routes are wanted.

        Raises EngineError if no engine can serve the call.
        """
        ...


def cut_at_stop(
    generation: Generation, stop: tuple[str, ...], text_of: Callable[[np.ndarray], str]
) -> Generation:
    """The reply up to the first token after which its text has a string of `stop`.

    text_of: the text of token ids.
    """
    tokens = generation.tokens

    def has_stop(length: int) -> bool:
        text = text_of(tokens[:length])
        return any(string in text for string in stop)

    if not stop or not has_stop(len(tokens)):
        return generation
    shortest = 1
    longest = len(tokens)
    while shortest < longest:
        middle = (shortest + longest) // 2
        if has_stop(middle):
            longest = middle
        else:
            shortest = middle + 1
    return truncated(generation, shortest, "stop")


def truncated(generation: Generation, length: int, finish_reason: str) -> Generation:
    """The first `length` tokens of a reply."""
    dropped = len(generation.tokens) - length
    if dropped <= 0:
        return generation

    def kept(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[: len(values) - dropped]

    return replace(
        generation,
        tokens=generation.tokens[:length],
        log_probs=kept(generation.log_probs),
        versions=generation.versions[:length],
        finish_reason=finish_reason,
        routes=kept(generation.routes),
        missing_routes=kept(generation.missing_routes),
    )
