"""Groups from inference servers: rank 0 is their client and holds the samples; the others get their rows, or its error.

Rank 0 broadcasts at least every `_POLL_SECONDS`, so that the other ranks' collectives do not time out during a long
response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import EngineError, SharedEngineError
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.rollout.group_source import Weights, check_count, engine_name
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.server_engine.request_stream import RequestStream, WeightsNeeded
from megatron_gspo.rollout.server_engine.server_engine import ServerEngine
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from megatron_gspo.rollout.weight_distribution import WeightDistribution

T = TypeVar("T")
Group = list[Sample]

_POLL_SECONDS = 20.0  # longest time between two broadcasts of rank 0
_RETRY_SECONDS = 1.0  # before an update that no server took is tried again


class ServerSource:
    """`GroupSource` on servers. Requests are in flight from `submit` on, over weight updates too."""

    def __init__(self, engine: ServerEngine | None, config: ServerConfig, *, vocab_size: int, groups_per_step: int,
                 log: Callable[[str], None] = print,
                 distribution: WeightDistribution | None = None) -> None:  # fmt: skip
        """engine: on rank 0, None on the others. groups_per_step: groups that a step trains on, from which `collect`
        computes which groups become too old. log: takes lines about the servers, on rank 0. distribution: of the
        weights; None: rank 0 sends all.
        """
        self.engine_name = engine_name(ServerEngine)
        self._engine, self._vocab_size = engine, vocab_size
        self._distribution = distribution or WeightDistribution(engine, None if engine is None else engine.sender)
        self._groups_per_step, self._config, self._log = groups_per_step, config, log
        self._training = _Requests(self)
        self._weights: Weights | None = None
        self._version = 0
        self._memory_released = False  # with the weights in it

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> None:
        """See `GroupSource.submit`."""
        self.restore_memory()
        self._training.submit(prompts, sampling, seed)

    def collect(self, count: int, *, oldest_version: int | None = None) -> SampleBatch:
        """See `GroupSource.collect`."""
        self.restore_memory()
        return self._training.collect(count, oldest_version)

    def pending(self) -> list[int]:
        """See `GroupSource.pending`."""
        return [prompt.index for prompt, _ in self._training.pending.values()]

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> SampleBatch:
        """See `GroupSource.generate`."""
        self.restore_memory()
        requests = _Requests(self)
        requests.submit(prompts, sampling, seed)
        return requests.collect(len(prompts), None)

    def update_weights(self, weights: Weights, *, version: int) -> None:
        """See `GroupSource.update_weights`. Retries until a server has the weights, `recovery_timeout` at most."""
        self._weights, self._version = weights, version
        self._send_weights()

    def pause(self, *, keep: bool) -> None:
        """See `GroupSource.pause`."""
        if self._training.pending:
            self.on_rank_zero(lambda: self._training.stop(keep=keep))
        if not keep:
            self._training.pending.clear()
        if self._config.colocated:
            self.on_rank_zero(lambda: self.client.pause())
            self._memory_released = True

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """See `GroupSource.score`."""
        self.restore_memory()
        return self.on_rank_zero(lambda: self.client.score(sequences))

    def metrics(self) -> dict[str, float]:
        """See `GroupSource.metrics`."""
        return self._engine.counts() if self._engine is not None else {}

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()
        else:
            self._distribution.close()

    @property
    def client(self) -> ServerEngine:
        """The engine; on rank 0 only."""
        assert self._engine is not None, "only rank 0 is the servers' client"
        return self._engine

    def restore_memory(self) -> None:
        """Send the weights again if `pause` released the servers' memory and no update followed."""
        if self._memory_released:
            self._send_weights()

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """`run_on_rank_zero`; its `EngineError` becomes a `SharedEngineError`."""
        try:
            return run_on_rank_zero(action, error=EngineError, what="the engine failed")
        except EngineError as error:
            raise SharedEngineError(str(error)) from error

    def poll(self, action: Callable[[], T]) -> T | None:
        """`action` on rank 0, its value on every rank. None if no server has the current weights, which are then sent.

        action: takes `_POLL_SECONDS` at most.
        """

        def attempt() -> tuple[bool, T | None]:
            try:
                return True, action()
            except WeightsNeeded:
                return False, None

        served, value = self.on_rank_zero(attempt)
        if not served:
            self._send_weights()
        return value

    def announce(self, samples: list[Sample] | None, prompts: Sequence[Prompt],
                 sampling: SamplingParams) -> SampleBatch:  # fmt: skip
        """Rank 0's samples, once they are checked, with their rows on every rank."""
        self.on_rank_zero(lambda: check_samples(samples, prompts, sampling, vocab_size=self._vocab_size))
        own = samples or []
        return SampleBatch.gathered(own, range(len(own)), dist.group.WORLD)

    def take(self, stream: RequestStream | None, count: int, oldest: int | None) -> dict[int, Group]:
        """Up to `count` finished groups of rank 0's stream by ticket; empty lists on the other ranks."""
        found: dict[int, Group] = {}

        def attempt() -> list[int]:
            assert stream is not None
            found.update(stream.take_tickets(count, patience=_POLL_SECONDS, oldest=oldest,
                                             per_step=self._groups_per_step))  # fmt: skip
            return list(found)

        tickets = self.poll(attempt) or []
        return found or {ticket: [] for ticket in tickets}

    def _send_weights(self) -> None:
        assert self._weights is not None, "update_weights comes before collect"
        deadline, reported = time.monotonic() + self._config.recovery_timeout, ""
        while True:
            failure = self._distribution.run(self._weights, self._version)
            refusal = str(failure or "")
            if not self.on_rank_zero(lambda f=failure, new=refusal != reported: self._must_retry(f, deadline, new)):
                self._memory_released = False
                return
            reported = refusal
            while not self.on_rank_zero(lambda r=refusal: self._server_is_back(r, deadline)):
                pass

    def _must_retry(self, failure: Exception | None, deadline: float, is_new: bool) -> bool:
        if failure is None:
            return False
        if not isinstance(failure, NoServerError) or time.monotonic() >= deadline:
            raise failure
        if is_new:
            self._log(str(failure))
        time.sleep(_RETRY_SECONDS)
        return True

    def _server_is_back(self, refusal: str, deadline: float) -> bool:
        """Whether a server answers within `_POLL_SECONDS`. Raises at the deadline."""
        left = deadline - time.monotonic()
        if self.client.wait_for_server(min(max(left, 0.0), _POLL_SECONDS)):
            return True
        if left <= 0:
            raise NoServerError(refusal)
        return False


class _Requests:
    """Groups in flight on one request stream. Every rank knows which are pending; rank 0 has the stream."""

    def __init__(self, source: ServerSource) -> None:
        self._source = source
        self._stream: RequestStream | None = None
        self._next_ticket = 0  # of the stream, which numbers them in the order of `start`
        self.pending: dict[int, tuple[Prompt, SamplingParams]] = {}

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        def start() -> None:
            self._stream = self._stream or self._source.client.stream()
            self._stream.start(prompts, sampling, seed=seed)

        self._source.on_rank_zero(start)
        self.pending |= {self._next_ticket + i: (prompt, sampling) for i, prompt in enumerate(prompts)}
        self._next_ticket += len(prompts)

    def collect(self, count: int, oldest: int | None) -> SampleBatch:
        check_count(count, len(self.pending))
        groups: dict[int, Group] = {}
        while len(groups) < count:
            groups |= self._source.take(self._stream, count - len(groups), oldest)
        tickets = sorted(groups)
        taken = [self.pending.pop(ticket) for ticket in tickets]
        samples = [sample for ticket in tickets for sample in groups[ticket]] if dist.get_rank() == 0 else None
        return self._source.announce(samples, [prompt for prompt, _ in taken], taken[0][1])

    def stop(self, *, keep: bool) -> None:
        if self._stream is not None:
            self._stream.stop(keep=keep)
