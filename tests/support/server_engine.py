"""Servers in one process, without a training loop: requests and weight updates as a run makes them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import first_line
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.weight_sync import WeightSync
from megatron_gspo.servers.http_client import EventLoop, ServerClient
from megatron_gspo.weight_transport.receiver_transport import ReceiverTransport
from megatron_gspo.weight_transport.transport import Stream, WeightTransport
from megatron_gspo.weight_transport.weight_update import ServerUpdate


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """This process is the only rank of a process group."""
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class ServerEngine:
    """The client of all servers and their weight updates, in the only rank of a run.

    weight_version: of the last update that a server took.
    """

    def __init__(
        self,
        config: ServerConfig,
        client: RolloutClient,
        transport: WeightTransport,
        *,
        log: Callable[[str], None] = print,
    ) -> None:
        self.client = client
        self.transport = transport
        self.weight_version: int | None = None
        with only_rank():
            self.sync = WeightSync(config, client, transport, log=log)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """All samples of the prompts, in their order."""
        stream = self.client.stream()
        tickets = stream.start(prompts, sampling, seed=seed)
        groups = dict(stream.take_tickets(len(tickets)))
        return [sample for ticket in tickets for sample in groups[ticket]]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """An update; raises why no server took it. An iterator is read once."""
        with only_rank():
            failure = self.sync.run(lambda source=None: iter(named_tensors), version)
        if failure is not None:
            raise failure
        self.weight_version = version

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return self.client.score(sequences)

    @property
    def num_serving(self) -> int:
        return len(self.client.pool.serving)

    def close(self) -> None:
        self.sync.close()
        self.client.close()


def update_servers(
    loop: EventLoop,
    servers: Sequence[ServerClient],
    weights: Callable[[], Stream],
    transport: WeightTransport,
    *,
    version: str,
    bucket_bytes: int,
    timeout: float,
) -> Mapping[str, str]:
    """Update servers from one source, without a client; url -> one line, for each that failed.

    weights: starts a stream; called again where a group of servers broke.
    """
    update = ServerUpdate(loop, servers, transport, version=version, timeout=timeout)
    try:
        update.begin()
        transfers = 0
        while update.next_transfer() is not None:
            transport.begin(version, 0)
            if isinstance(transport, ReceiverTransport):
                transfer = f"{version}/{transfers}"
                update.receive([transport.offer(update.pending, transfer, timeout)], transfer)
            transfers += 1
            update.record(
                [
                    transport.transfer(
                        loop,
                        update.pending,
                        weights(),
                        bucket_bytes=bucket_bytes,
                        timeout=timeout,
                    )
                ]
            )
        update.finish(num_sources=1)
    except BaseException:
        update.abandon()
        raise
    return {url: first_line(error) for url, error in update.failures.items()}
