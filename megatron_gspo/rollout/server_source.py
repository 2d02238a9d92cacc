"""Groups from inference servers. Some ranks are clients: each requests, checks and holds its share
of the samples.

Rank 0 is one of them. It alone updates the servers and sends their states to the other clients.
While groups are awaited the ranks meet in rounds: the clients report how far their groups are, and
every rank selects the same ones. A round takes `_ROUND_SECONDS` at most, so that no rank waits long
in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.data.chosen_prompts import ChosenPrompts, PromptRef
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import EngineError, SharedEngineError
from megatron_gspo.parallel.host_exchange import max_over_ranks, sum_over_ranks
from megatron_gspo.parallel.rank_zero import run_on_every_rank, run_on_rank_zero
from megatron_gspo.parallel.typed_messages import Type
from megatron_gspo.rollout.group_source import Weights, check_count
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.sample_exchange import split_prompts
from megatron_gspo.rollout.server_engine.open_group import RESPONSES, GroupKind
from megatron_gspo.rollout.server_engine.request_stream import (
    RequestStream,
    WeightsNeeded,
    select_groups,
)
from megatron_gspo.rollout.server_engine.rollout_client import (
    COUNTS,
    PoolState,
    RolloutClient,
    server_metrics,
)
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from megatron_gspo.rollout.weight_sync import WeightSync
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

# As checkpoints with kept rollouts name it.
_ENGINE_NAME = "megatron_gspo.rollout.server_engine.server_engine.ServerEngine"
_ROUND_SECONDS = 0.2  # longest wait of a client for its own groups, before the ranks meet
_POLL_SECONDS = 20.0  # longest time between two broadcasts of rank 0 while it waits for a server
_RETRY_SECONDS = 1.0  # before an update that no server took is tried again


class ServerSource:
    """`GroupSource` on servers.

    Requests are in flight from `submit` on, over weight updates too.
    """

    def __init__(
        self,
        client: RolloutClient | None,
        clients: Sequence[int],
        sync: WeightSync,
        config: ServerConfig,
        *,
        groups_per_step: int,
        kind: GroupKind = RESPONSES,
        log: Callable[[str], None] = logger.info,
    ) -> None:
        """A source of groups that servers generate.

        Args:
            client: on the ranks `clients`, of which 0 is the first.
            sync: sends the weights.
            groups_per_step: groups that a step trains on, from which `collect` computes which
                groups become too old.
            kind: what a group is.
            log: takes lines about the servers, on rank 0.
        """
        self.engine_name = _ENGINE_NAME
        self.groups_per_step = groups_per_step
        self._client = client
        self._clients = tuple(clients)
        self._sync = sync
        self._config = config
        self.kind = kind
        self._log = log
        self._training = _Requests(self)
        self._weights: Weights | None = None
        self._version = 0
        self._reported = ""  # why no server took the weights, as it was logged last
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
        return [group.prompt.index for group in self._training.pending.values()]

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> SampleBatch:
        """See `GroupSource.generate`."""
        self.restore_memory()
        requests = _Requests(self)
        requests.submit(prompts, sampling, seed)
        return requests.collect(len(prompts), None)

    def update_weights(self, weights: Weights, *, version: int) -> None:
        """See `GroupSource.update_weights`.

        Retries until a server has the weights, `recovery_timeout` at most.
        """
        self._weights = weights
        self._version = version
        self._send_weights()

    def pause(self, *, keep: bool) -> None:
        """See `GroupSource.pause`."""
        if self._training.pending:
            self.on_clients(lambda client: client.pause())
            self.on_clients(lambda client: self._training.stop(keep=keep))
        if not keep:
            self._training.pending.clear()
        if self._config.colocated:
            self.on_rank_zero(lambda client: client.release_memory())
            self._memory_released = True

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """See `GroupSource.score`."""
        self.restore_memory()
        return self.on_rank_zero(
            lambda client: client.score(sequences), dict[str, list[np.ndarray]]
        )

    def metrics(self) -> dict[str, float]:
        """See `GroupSource.metrics`; the sums over the clients. A server is as busy as the client
        that keeps it busiest sees it.
        """
        counts = [0] * len(COUNTS)
        busy = [0.0] * self._num_servers
        if self._client is not None:
            counts = self._client.take_counts()
            busy = self._client.take_busy_seconds()
        counts = sum_over_ranks(np.array(counts, dtype=np.int64), dist.group.WORLD).tolist()
        busy = max_over_ranks(np.array(busy), dist.group.WORLD).tolist()
        if dist.get_rank() != 0 or self._client is None:
            return {}
        return server_metrics(counts, busy, len(self._client.pool.serving))

    def close(self) -> None:
        """See `GroupSource.close`; ends the servers that the run has started."""
        self._sync.close()
        if self._client is not None:
            self._client.close()

    def restore_memory(self) -> None:
        """Send the weights again if `pause` released the servers' memory and no update followed."""
        if self._memory_released:
            self._send_weights()

    def own_share(self, prompts: Sequence[Prompt], seed: int = 0) -> list[int]:
        """The positions of the prompts that this rank requests. seed: of the requests; the first
        client depends on it alone, so that a resumed run has the same shares."""
        if self._client is None:
            return []
        shares = split_prompts(prompts, len(self._clients))
        return shares[(self._clients.index(dist.get_rank()) - seed) % len(shares)]

    def on_rank_zero(self, action: Callable[[RolloutClient], T], returns: Type = Any) -> T:
        """`run_on_rank_zero` with its client; an `EngineError` becomes a `SharedEngineError`."""

        def with_client() -> T:
            return action(self._client)  # type: ignore[arg-type]  # rank 0 has one

        return _shared(
            lambda: run_on_rank_zero(
                with_client, returns=returns, error=EngineError, what="the engine failed"
            )
        )

    def on_clients(self, action: Callable[[RolloutClient], T]) -> T | None:
        """An action of every client; its value there. An error of any is raised on every rank
        as by `on_rank_zero`.
        """
        return _shared(
            lambda: run_on_every_rank(
                lambda: None if self._client is None else action(self._client),
                error=EngineError,
                what="the engine failed",
            )
        )

    def round(self, action: Callable[[float], int]) -> int:
        """An action of every client that takes the given seconds at most; the largest value, on
        every rank.

        In the same round rank 0 learns what requests found at the servers, and the others its
        states. If no server has the current weights, they are sent, and the value is at least 1.
        """

        def attempt(client: RolloutClient) -> list[int]:
            needs_weights = False
            try:
                value = action(_ROUND_SECONDS)
            except WeightsNeeded:
                value = 1
                needs_weights = True
            return [value, needs_weights, *client.reports().ravel().tolist()]

        without_client = [0, 0] + [0] * (2 * self._num_servers)
        answer = self.on_clients(attempt) or without_client
        value, needs_weights, *reports = max_over_ranks(
            np.array(answer, dtype=np.int64), dist.group.WORLD
        ).tolist()
        self._share_states(np.array(reports).reshape(2, -1))
        if needs_weights:
            self._send_weights()
        return value

    def checked(
        self,
        samples: Sequence[Sample],
        share: Sequence[int],
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
    ) -> SampleBatch:
        """The samples of all clients, once they are checked, in the order of the prompts. share:
        positions of the prompts whose samples are this rank's."""
        requested = [prompts[i] for i in share]
        self.on_clients(
            lambda client: check_samples(
                samples, requested, sampling, vocab_size=client.model.vocab_size
            )
        )
        n = sampling.n_samples_per_prompt
        return SampleBatch.gathered(
            samples, [i * n + j for i in share for j in range(n)], dist.group.WORLD
        )

    @property
    def _num_servers(self) -> int:
        return len(self._config.urls) or self._config.num_servers

    def _share_states(self, reports: np.ndarray | None = None) -> None:
        def exchange(client: RolloutClient) -> PoolState:
            if reports is not None:
                client.record(reports)
            return client.state()

        state = self.on_rank_zero(exchange, PoolState)
        if self._client is not None and dist.get_rank() != 0:
            self._client.follow(state)

    def _send_weights(self) -> None:
        if self._memory_released and torch.cuda.is_initialized():
            # A step's activations, which torch has kept: the servers are about to take theirs back.
            torch.cuda.empty_cache()
        deadline = time.monotonic() + self._config.recovery_timeout
        self._reported = ""
        while not self._try_to_send(deadline):
            pass
        self._memory_released = False

    def _try_to_send(self, deadline: float) -> bool:
        """One update: whether a server has the weights. If none has, wait until one answers."""
        assert self._weights is not None, "update_weights comes before collect"
        if self.on_rank_zero(lambda _: self._sync.interrupts(self._version)):
            # All of them, before one aborts at the servers.
            self.on_clients(lambda client: client.pause())
            self.on_clients(lambda client: client.interrupt())
        failure = self._sync.run(self._weights, self._version)
        self._share_states()
        if not self.on_rank_zero(lambda _: self._must_retry(failure, deadline)):
            return True
        refusal = str(failure)
        while not self.on_rank_zero(lambda client: _server_is_back(client, refusal, deadline)):
            pass
        return False

    def _must_retry(self, failure: Exception | None, deadline: float) -> bool:
        """On rank 0. Raises a failure that waiting does not help, or any after the deadline."""
        if failure is None:
            return False
        if not isinstance(failure, NoServerError) or time.monotonic() >= deadline:
            raise failure
        if str(failure) != self._reported:
            self._log(str(failure))
            self._reported = str(failure)
        time.sleep(_RETRY_SECONDS)
        return True


def _server_is_back(client: RolloutClient, refusal: str, deadline: float) -> bool:
    """Whether a server answers within `_POLL_SECONDS`. Raises at the deadline."""
    remaining = deadline - time.monotonic()
    if client.wait_for_server(min(max(remaining, 0.0), _POLL_SECONDS)):
        return True
    if remaining <= 0:
        raise NoServerError(refusal)
    return False


def _shared(collective: Callable[[], T]) -> T:
    try:
        return collective()
    except EngineError as error:
        raise SharedEngineError(str(error)) from error


@dataclass
class _Group:
    """A group in flight, as every rank has it; see `GroupProgress`."""

    ticket: int
    prompt: PromptRef
    sampling: SamplingParams
    finished: bool = False
    oldest_version: int | None = None


class _Requests:
    """Groups in flight. Every rank has all of them and their progress; each client has its own
    stream.
    """

    def __init__(self, source: ServerSource) -> None:
        self._source = source
        self._stream: RequestStream | None = None
        self._stream_tickets: dict[int, int] = {}  # ticket -> ticket of this client's stream
        self._next_ticket = 0
        self.pending: dict[int, _Group] = {}

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        first = self._next_ticket
        share = self._source.own_share(prompts, seed)

        def start(client: RolloutClient) -> None:
            self._stream = self._stream or client.stream(self._source.kind)
            tickets = self._stream.start([prompts[i] for i in share], sampling, seed=seed)
            for i, ticket in zip(share, tickets, strict=True):
                self._stream_tickets[first + i] = ticket

        self._source.on_clients(start)
        refs = ChosenPrompts.of(prompts).refs
        for ticket, ref in enumerate(refs, start=first):
            self.pending[ticket] = _Group(ticket, ref, sampling)
        self._next_ticket += len(prompts)

    def collect(self, count: int, oldest: int | None) -> SampleBatch:
        check_count(count, len(self.pending))
        while len(chosen := self._select(count, oldest)) < count:
            self._source.round(self._wait)
        tickets = sorted(group.ticket for group in chosen)
        groups = [self.pending.pop(ticket) for ticket in tickets]
        share = [i for i, ticket in enumerate(tickets) if ticket in self._stream_tickets]
        own_tickets = [tickets[i] for i in share]
        samples = self._source.on_clients(lambda client: self._take(own_tickets)) or []
        prompts = ChosenPrompts(group.prompt for group in groups)
        return self._source.checked(samples, share, prompts, groups[0].sampling)

    def stop(self, *, keep: bool) -> None:
        if self._stream is not None:
            self._stream.stop(keep=keep)
        if not keep:
            self._stream_tickets.clear()

    def _select(self, count: int, oldest: int | None) -> list[_Group]:
        """The groups to take, the same on every rank; fewer than `count` if others must be
        waited for.
        """
        by_stream_ticket = {}
        if self._stream is not None:
            by_stream_ticket = {group.ticket: group for group in self._stream.progress()}
        # For each group: whether it is finished, and its oldest version + 1, or 0 without one.
        progress = np.zeros((len(self.pending), 2), dtype=np.int64)
        for row, ticket in enumerate(self.pending):
            if ticket in self._stream_tickets:
                seen = by_stream_ticket[self._stream_tickets[ticket]]
                version = 0 if seen.oldest_version is None else seen.oldest_version + 1
                progress[row] = seen.finished, version
        everyone = max_over_ranks(progress, dist.group.WORLD).tolist()
        for group, (is_finished, version) in zip(self.pending.values(), everyone, strict=True):
            group.finished = bool(is_finished)
            group.oldest_version = version - 1 if version else None
        return select_groups(
            list(self.pending.values()), count, oldest, self._source.groups_per_step
        )

    def _wait(self, seconds: float) -> int:
        if self._stream is not None:
            self._stream.wait(seconds)
        return 0

    def _take(self, tickets: Sequence[int]) -> list[Sample]:
        if self._stream is None:
            return []
        groups = self._stream.remove([self._stream_tickets.pop(ticket) for ticket in tickets])
        return [sample for group in groups for sample in group]
