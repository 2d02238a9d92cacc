"""Rewards of samples by a verifier. Failures are counted and never fatal here."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rewards.named_reward import VERDICTS
from megatron_gspo.rewards.verifiers import Verifier, load_verifier
from megatron_gspo.rewards.worker import Reply, run_batch, run_verifier
from megatron_gspo.rewards.worker_pool import RewardPool
from megatron_gspo.terminal import get_logger

if TYPE_CHECKING:  # the config imports torch, which the process that hosts agents does without
    from megatron_gspo.config import DataConfig

logger = get_logger(__name__)

# Of one response in this process until a line tells of it, and between such lines.
_NOTICE_SECONDS = 10.0
FAILURES = ("error", "timeout", "invalid")
# The key of `Sample.metadata` with the reason why a response has no score: "error: ...".
FAILURE = "verifier_failure"


@dataclass(frozen=True)
class Scores:
    """The scores of N samples, in their order."""

    rewards: np.ndarray
    """[N] float32; NaN for a failure, unless failures have a reward of their own."""

    statuses: tuple[str, ...]
    """For each sample "ok", "error", "timeout" or "invalid"."""

    messages: tuple[str, ...]
    """For each failure why; "" for the others."""

    counts: dict[str, int]
    """How many of each failure ("error", "timeout", "invalid"; 0 included)."""

    verdicts: dict[str, int]
    """How many of each of the verifier's `VERDICTS`, 0 included."""

    @property
    def failures(self) -> list[str]:
        """[N] `Reply.failure` of each sample."""
        replies = zip(self.statuses, self.messages, strict=True)
        return [Reply(status, message=message).failure for status, message in replies]


class RewardScorer:
    """Scores samples with one verifier.

    With a time limit the verifier runs in worker processes (`RewardPool`), which run until `close`,
    are killed when a response takes too long, and may crash. timeout=None runs it in this process:
    faster for cheap verifiers; exceptions are counted, but a hang or a crash affects the training
    process.

    Attributes:
        description: what the verifier says of itself in one line, None for nothing.
        takes_batch: whether it scores many responses in a call.
        verdicts: the names of `VERDICTS` that the verifier gives.
    """

    takes_batch = False

    def __init__(
        self,
        verifier: str,
        options: dict[str, Any] | None = None,
        *,
        timeout: float | None = 10.0,
        workers: int = 1,
        failure_reward: float | None = None,
    ):
        """Load the verifier.

        Args:
            verifier, options: see `load_verifier`.
            timeout: seconds a response.
            failure_reward: reward of a failure; None: NaN, which the loop excludes and counts.

        Raises:
            VerifierError: the verifier can't be loaded; in one line.
        """
        if failure_reward is not None and not np.isfinite(failure_reward):
            raise ValueError(f"failure_reward is {failure_reward}; it must be finite")
        self._failure_reward = failure_reward
        self._name = verifier
        self.verdicts = VERDICTS.get(verifier, ())
        self._pool: RewardPool | None = None
        self._verifier: Verifier | None = None
        if timeout is None:
            self._verifier = load_verifier(verifier, options)
            self.description: str | None = getattr(self._verifier, "description", None)
            self.takes_batch = getattr(self._verifier, "takes_batch", False)
        else:
            self._pool = RewardPool(verifier, options, timeout=timeout, workers=workers)
            self.description = self._pool.description
            self.takes_batch = self._pool.takes_batch

    @property
    def needs_whole_batch(self) -> bool:
        """Whether it must see all responses of a batch at once."""
        return self.takes_batch and not getattr(self._verifier, "scores_shares", False)

    def score(self, samples: Sequence[Sample], prompts: Iterable[Prompt]) -> Scores:
        """Rewards of the samples; each gets the prompt whose index is its prompt_index. Changes no
        sample.

        Raises ValueError for a sample without its prompt.
        """
        by_index = {prompt.index: prompt for prompt in prompts}
        for sample in samples:
            if sample.prompt_index not in by_index:
                raise ValueError(
                    f"sample {sample.prompt_index}/{sample.sample_index}: its prompt was not given"
                )
        return self.score_texts(
            [(sample.text, by_index[sample.prompt_index]) for sample in samples]
        )

    def score_texts(self, requests: Sequence[tuple[str, Prompt]]) -> Scores:
        """Rewards of responses, each with its prompt."""
        if self.takes_batch:
            replies = self._run_batch(requests)
        elif self._pool is not None:
            replies = self._pool.run(requests)
        else:
            replies = self._run_here(requests)
        return self._summarise(replies)

    def _run_batch(self, requests: Sequence[tuple[str, Prompt]]) -> list[Reply]:
        """Score all in one call; the time limit is that of the call."""
        texts = [text for text, _ in requests]
        prompts = [prompt for _, prompt in requests]
        if not texts:
            return []
        if self._pool is None:
            assert self._verifier is not None
            return run_batch(self._verifier, texts, prompts)
        [reply] = self._pool.run([(texts, prompts)])
        if reply.status != "ok":
            return [reply] * len(texts)
        return [Reply(**fields) for fields in reply.value]

    def _run_here(self, requests: Sequence[tuple[str, Prompt]]) -> list[Reply]:
        """Score in this process.

        A thread tells of a response that takes long, if the verifier lets it run.
        """
        assert self._verifier is not None
        replies: list[Reply] = []
        began = time.monotonic()
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_NOTICE_SECONDS):
                seconds = time.monotonic() - began
                if seconds >= _NOTICE_SECONDS and len(replies) < len(requests):
                    index = requests[len(replies)][1].index
                    logger.warning(
                        f"verifier {self._name!r}: a response to prompt {index} takes {seconds:.0f}"
                        f" s so far, without a time limit; {len(replies)} of {len(requests)} are"
                        " done"
                    )

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            for text, prompt in requests:
                began = time.monotonic()
                replies.append(run_verifier(self._verifier, text, prompt))
        finally:
            over.set()
            watcher.join()
        return replies

    def release(self) -> None:
        """End the worker processes until there are responses to score again."""
        if self._pool is not None:
            self._pool.release()

    def close(self) -> None:
        """End the worker processes.

        Also done when the scorer is garbage-collected and at interpreter exit.
        """
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _summarise(self, replies: Sequence[Reply]) -> Scores:
        failure_reward = np.nan if self._failure_reward is None else self._failure_reward
        rewards = np.array(
            [failure_reward if reply.value is None else reply.value for reply in replies],
            dtype=np.float32,
        )
        statuses = tuple(reply.status for reply in replies)
        # The message of a success is the name of its verdict.
        messages = tuple("" if reply.status == "ok" else reply.message or "" for reply in replies)
        verdicts = [reply.message for reply in replies if reply.status == "ok"]
        return Scores(
            rewards=rewards,
            statuses=statuses,
            messages=messages,
            counts={name: statuses.count(name) for name in FAILURES},
            verdicts={name: verdicts.count(name) for name in self.verdicts},
        )


def scorer_maker(data: DataConfig) -> Callable[[], RewardScorer]:
    """Makes what `scorer_of` returns, in this process or in another one."""
    return functools.partial(
        RewardScorer,
        data.resolved_verifier,
        data.resolved_verifier_options,
        timeout=data.verifier_timeout,
        workers=data.verifier_workers,
        failure_reward=data.verifier_failure_reward,
    )


def scorer_of(data: DataConfig) -> RewardScorer:
    """The verifier of a source of prompts. Raises VerifierError if it can't be loaded."""
    return scorer_maker(data)()


def score(
    samples: Sequence[Sample],
    prompts: Iterable[Prompt],
    verifier: str,
    *,
    timeout: float | None = 10.0,
    workers: int = 1,
) -> Scores:
    """Score once, with new workers. To score repeatedly, keep a `RewardScorer`."""
    with RewardScorer(verifier, timeout=timeout, workers=workers) as scorer:
        return scorer.score(samples, prompts)
