"""A scripted server engine: groups finish in the reverse order of their start, one at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.rollout.group_source import Weights
from megatron_gspo.rollout.server_engine.open_group import GroupKind
from megatron_gspo.rollout.server_engine.request_stream import Progress, WeightsNeeded
from megatron_gspo.rollout.server_engine.rollout_client import PoolState
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.server_source import ServerSource
from megatron_gspo.weight_transport.weight_source import WeightSource
from tests.support.samples import make_prompt
from tests.support.scripted_engine import ScriptedEngine, ScriptedResponse
from tests.support.served_models import served_model


@dataclass
class ScriptedServers(ScriptedEngine):
    """`ScriptedEngine` with the methods of `RolloutClient`.

    lost_weights: the next wait raises `WeightsNeeded`. failures: errors of the next updates. fails:
    error of every wait. waits: of streams. slow: seconds that each takes. requested: prompts of all
    groups. followed: states that another rank told.
    """

    lost_weights: bool = False
    failures: list[Exception] = field(default_factory=list)
    fails: Exception | None = None
    waits: int = 0
    slow: float = 0.0
    requested: list[int] = field(default_factory=list)
    followed: list[PoolState] = field(default_factory=list)
    model: ServedModel = field(default_factory=lambda: served_model(vocab_size=1000))

    def interrupt(self) -> None:
        self.calls.append("interrupt")

    def reports(self) -> np.ndarray:
        return np.zeros((2, 1), dtype=np.int64)

    def record(self, reports: np.ndarray) -> None:
        assert reports.tolist() == [[0], [0]]

    def state(self) -> PoolState:
        return PoolState(str(len(self.updates)), self.updates[-1][0] if self.updates else 0, {})

    def follow(self, state: PoolState) -> None:
        self.followed.append(state)
        self.updates.append((state.training_version, {}))

    def stream(self, kind: GroupKind) -> ScriptedStream:
        return ScriptedStream(self)

    def wait_for_server(self, seconds: float) -> bool:
        self.calls.append("wait")
        return True

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return {"http://a": [np.zeros(len(tokens) - 1, np.float32) for tokens in sequences]}

    def take_counts(self) -> list[int]:
        return [3, 0, 0, 0, 0, 0, 8, 2]

    def take_busy_seconds(self) -> list[float]:
        return [1.5]

    @property
    def pool(self) -> SimpleNamespace:
        return SimpleNamespace(serving=["http://a"])

    def release_memory(self) -> None:
        self.calls.append("release")


@dataclass
class ScriptedSync:
    """`WeightSync` to `ScriptedServers`, from rank 0 alone; None on the other ranks."""

    servers: ScriptedServers | None

    def interrupts(self, version: int) -> bool:
        return True

    def run(self, weights: Weights, version: int) -> Exception | None:
        if self.servers is not None and self.servers.failures:
            failure = self.servers.failures.pop(0)
        else:
            failure = None
        if run_on_rank_zero(lambda: failure is not None):
            return failure
        tensors = list(weights())
        if self.servers is not None:
            self.servers.update_weights(iter(tensors), version=version)
        return None

    def close(self) -> None:
        pass


class ScriptedStream:
    """`RequestStream` on `ScriptedServers`."""

    def __init__(self, engine: ScriptedServers) -> None:
        self.engine = engine
        self.tickets = 0
        self.groups: dict[int, list[Sample]] = {}
        self.finished: set[int] = set()

    def start(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> list[int]:
        tickets = list(range(self.tickets, self.tickets + len(prompts)))
        self.tickets += len(prompts)
        for ticket, prompt in zip(tickets, prompts, strict=True):
            self.groups[ticket] = self.engine.generate([prompt], sampling, seed=seed)
            self.engine.requested.append(prompt.index)
        return tickets

    def progress(self) -> list[Progress]:
        return [Progress(ticket, ticket in self.finished, None) for ticket in self.groups]

    def wait(self, seconds: float) -> None:
        if self.engine.fails is not None:
            raise self.engine.fails
        if self.engine.lost_weights:
            self.engine.lost_weights = False
            raise WeightsNeeded
        if unfinished := set(self.groups) - self.finished:
            time.sleep(self.engine.slow)
            self.engine.waits += 1
            self.finished.add(max(unfinished))

    def remove(self, tickets: Sequence[int]) -> list[list[Sample]]:
        assert set(tickets) <= self.finished, "only finished groups are taken"
        return [self.groups.pop(ticket) for ticket in tickets]

    def stop(self, *, keep: bool) -> None:
        self.engine.calls.append(f"stop keep={keep}")
        if not keep:
            self.groups.clear()


def scripted_response(prompt: Prompt, number: int, seed: int) -> ScriptedResponse:
    """Depends on prompt, sample and seed."""
    return ScriptedResponse(
        [5 + number, 6 + prompt.index, 7 + seed, 1], [-1.0] * 4, text="x" * number
    )


SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=8)
PROMPTS = [make_prompt(i, text="ab" * (i + 1)) for i in range(5)]


def collective_weights(source: WeightSource | None = None, /) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream that is a collective, as the policy's."""
    for name in ("a", "b"):
        value = torch.ones(2)
        dist.all_reduce(value)
        yield name, value


def server_source(
    servers: ScriptedServers | None, *, clients: Sequence[int] = (0,), **options
) -> ServerSource:
    """servers: on the clients."""
    log = options.pop("log", print)
    config = ServerConfig(urls=("http://a:1",), **{"recovery_timeout": 5.0, **options})
    sync: Any = ScriptedSync(servers if dist.get_rank() == 0 else None)
    client: Any = servers
    return ServerSource(client, clients, sync, config, groups_per_step=2, log=log)


def keys(samples) -> list[tuple[int, int, int]]:
    """(prompt, sample, seed) of each, as the response has them."""
    return [
        (s.prompt_index, int(s.response_ids[0]) - 5, int(s.response_ids[2]) - 7) for s in samples
    ]
