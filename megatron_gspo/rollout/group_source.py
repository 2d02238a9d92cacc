"""The interface between the training loop and generation: a source of groups. A group is the n
samples of one prompt.

The samples of a group are consecutive in a batch. They are on the rank that generated or received
them; every rank has their rows (`SampleBatch`).

Engines in the trainer's processes (`InProcessSource`) and inference servers (`ServerSource`) follow
the same protocol; the loop treats them alike. A sample is a response, an episode with an
environment, or a run of an agent: engines that wrap the one in the processes make these, and on
servers a `GroupKind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.chosen_prompts import ChosenPrompts, PromptRef
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.weight_transport.weight_source import WeightSource


class Weights(Protocol):
    """Starts a stream of (Hugging Face name, full tensor); producing it is a collective of all
    ranks.
    """

    def __call__(self, source: WeightSource | None = None, /) -> Iterator[tuple[str, Tensor]]:
        """source: only its rank gets its tensors; all ranks read the sources in their order. None:
        every rank gets all."""
        ...


class GroupSource(Protocol):
    """Groups of samples for the loop. Every method is a collective: all ranks call it with the same
    arguments. A rank reads those `ChosenPrompts` alone whose responses it requests or generates.

    An error of one rank is raised on all of them as an `EngineError`; one that is a
    `SharedEngineError` leaves the ranks able to communicate.
    """

    engine_name: str
    """Module and class of the engine; kept rollouts of another one are not used."""

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> None:
        """Request a group for each prompt. A source with requests in flight begins to generate at
        once.

        Raises EngineError for a prompt that the engine can't serve.
        """
        ...

    def collect(self, count: int, *, oldest_version: int | None = None) -> SampleBatch:
        """Wait for `count` > 0 finished groups and return them in the order of `submit`.

        oldest_version: groups with a token of this weight version or an older one are returned
        first. None: no limit. Raises ValueError if fewer than `count` groups are pending.
        """
        ...

    def pending(self) -> list[int]:
        """Prompt indices of the groups that were submitted and not collected, in the order of
        `submit`.
        """
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> SampleBatch:
        """Samples of exactly these prompts, prompt-major, also while others are pending.

        Used for evaluation.
        """
        ...

    def update_weights(self, weights: Weights, *, version: int) -> None:
        """Send the weights to the engine; pending groups continue under them.

        weights: called at least once, and again when a server needs the same version later, so it
        must stream this version until the next call. Raises EngineError if no engine takes them.
        """
        ...

    def pause(self, *, keep: bool) -> None:
        """Stop generating until the next `collect` or `update_weights`; frees GPU memory shared
        with the trainer.

        keep: pending groups continue afterwards. Otherwise they are discarded, and nothing is
        pending.
        """
        ...

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """By server: log-probs [L - 1] float32 (temperature 1) of each sequence [L].

        Empty without servers.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` since the last call, on rank 0; empty without servers."""
        ...

    def close(self) -> None:
        """Free everything that the source holds. Calling it twice is allowed."""
        ...


@dataclass(frozen=True)
class _Request:
    prompt: PromptRef
    sampling: SamplingParams
    seed: int


class GenerateOnCollect(ABC):
    """`submit`, `collect` and `pending` of a source that has nothing in flight between calls."""

    def __init__(self) -> None:
        self._requests: list[_Request] = []

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> SampleBatch:
        """See `GroupSource.generate`."""

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> None:
        """See `GroupSource.submit`."""
        self._requests += [
            _Request(prompt, sampling, seed) for prompt in ChosenPrompts.of(prompts).refs
        ]

    def collect(self, count: int, *, oldest_version: int | None = None) -> SampleBatch:
        """See `GroupSource.collect`; all samples have the current weights."""
        check_count(count, len(self._requests))
        collected = self._requests[:count]
        self._requests = self._requests[count:]
        by_settings = groupby(collected, key=lambda request: (request.sampling, request.seed))
        batches = [
            self.generate(
                ChosenPrompts(request.prompt for request in requests), sampling, seed=seed
            )
            for (sampling, seed), requests in by_settings
        ]
        return reduce(SampleBatch.joined, batches)

    def pending(self) -> list[int]:
        """See `GroupSource.pending`."""
        return [request.prompt.index for request in self._requests]


def check_count(count: int, pending: int) -> None:
    """Raise ValueError unless so many groups, at least one, are pending."""
    if not 1 <= count <= pending:
        raise ValueError(
            f"collect({count}): {pending} groups were submitted; collect 1 to {pending}"
        )


def engine_name(engine: type) -> str:
    """Module and name of an engine's class."""
    return f"{engine.__module__}.{engine.__qualname__}"
