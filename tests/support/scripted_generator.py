"""A `Generator` whose replies are written by a test."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_gspo.agents.generation import CallLimits, Generation
from megatron_gspo.errors import EngineError

Script = Callable[[str, int], str | list[int]]
"""The text of a prompt and a seed to the text of the reply, or its token ids without the end."""


@dataclass
class Drawn:
    """A call that has come, in order."""

    prompt: np.ndarray
    limits: CallLimits
    seed: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class ScriptedGenerator:
    """Replies with `script`, and ends them with the tokenizer's end token.

    gate: while it is cleared, replies wait. version: of the weights. next_version: if set, the
    version from the middle of the next reply on. failures: raised by the next calls instead.
    paused: calls are paused all the time.
    """

    def __init__(self, tokenizer, script: Script) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.calls: list[Drawn] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.version = 0
        self.next_version: int | None = None
        self.failures: list[EngineError] = []
        self.paused = False

    @property
    def paused_seconds(self) -> float:
        return time.monotonic() if self.paused else 0.0

    async def generate(
        self, prompt: np.ndarray, limits: CallLimits, *, seed: int, routes_start: int
    ) -> Generation:
        call = Drawn(prompt, limits, seed)
        self.calls.append(call)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        reply = self.script(self.tokenizer.decode(prompt.tolist()), seed)
        ids = self.tokenizer.encode(reply) if isinstance(reply, str) else list(reply)
        ids.append(self.tokenizer.eos_token_id)
        finish = "stop"
        if len(ids) > limits.max_tokens:
            ids = ids[: limits.max_tokens]
            finish = "length"
        versions = np.full(len(ids), self.version, np.int32)
        if self.next_version is not None:
            versions[len(ids) // 2 :] = self.next_version
            self.version = self.next_version
            self.next_version = None
        call.tokens = np.array(ids, np.int64)
        positions = np.arange(routes_start, len(prompt) + len(ids) - 1)
        fed = np.concatenate([prompt, call.tokens])[positions]
        return Generation(
            call.tokens,
            -log_prob_sizes(prompt, call.tokens),
            versions,
            finish,
            routes=np.stack([fed % 4, positions % 4], axis=1)[:, None, :].astype(np.uint8),
        )


def log_prob_sizes(prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[r] float32: a number for each token that depends on all tokens before it."""
    seen = hashlib.blake2b(prompt.tobytes(), digest_size=4)
    sizes = []
    for token in tokens.tolist():
        seen.update(token.to_bytes(8, "little"))
        sizes.append(int.from_bytes(seen.copy().digest(), "little") / 2**32)
    return np.array(sizes, np.float32)
