"""The ranks that send weights to servers and files, as plain data; which rank hands which
tensors to which server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_gspo.config import ConfigError, ParallelConfig
from megatron_gspo.weight_transport.server_endpoints import ServerInfo


@dataclass(frozen=True)
class Relay:
    """A rank that gets another rank's tensors and sends them to the servers at these URLs."""

    rank: int
    servers: tuple[str, ...]


@dataclass(frozen=True)
class WeightSource:
    """A rank and what it sends: of its pipeline stage, what is not an expert's (`shared`), and its
    own `experts`.
    """

    rank: int
    shared: bool = True
    experts: bool = True
    servers: tuple[str, ...] | None = None
    """URLs of those that it sends to; None: all."""

    relays: tuple[Relay, ...] = ()
    """Ranks of other nodes that send its tensors to other servers."""

    number: int = 0
    """Its number among the `count` sources of an update."""

    count: int = 1

    @property
    def is_last(self) -> bool:
        """Whether no source follows it."""
        return self.number == self.count - 1

    @property
    def senders(self) -> dict[int, tuple[str, ...] | None]:
        """Each rank that sends its tensors, and to which servers; None: all."""
        servers_of_rank = {} if self.servers == () else {self.rank: self.servers}
        return servers_of_rank | {relay.rank: relay.servers for relay in self.relays}

    def targets(self, infos: Sequence[ServerInfo], rank: int) -> list[ServerInfo]:
        """The servers that a rank sends to."""
        servers = self.senders[rank]
        return [info for info in infos if servers is None or info.url in servers]


@dataclass(frozen=True)
class ServerPlace:
    """Where a server runs."""

    url: str
    node: int | None
    """The node, whose ranks are `node * ranks_per_node` and the following; None: a machine without
    ranks."""

    gpus: range
    """The GPUs of its ranks, as local ranks of the node."""


def numbered(sources: Sequence[WeightSource]) -> tuple[WeightSource, ...]:
    """The sources of an update, in the order in which the ranks read their streams."""
    return tuple(
        replace(source, number=number, count=len(sources)) for number, source in enumerate(sources)
    )


def hand_over(
    parallel: ParallelConfig, world: int, ranks_per_node: int, places: Sequence[ServerPlace]
) -> tuple[WeightSource, ...]:
    """The sources of an update by memory handles, which work within a node: every server gets each
    stage's shared tensors and each expert-parallel rank's experts from the nearest rank of its node
    that has them.

    A server's tensor-parallel ranks all get handles to the same whole tensors and copy their
    slices. Nearest: on one of the server's GPUs, else by the difference of the GPUs' numbers, then
    the lowest rank. Where no rank of the node has a share, one of another node sends it to one relay
    on each such node; the shares take a node's ranks in turn.

    Raises ConfigError for a server on no rank's node.
    """
    servers_of: dict[tuple[int, bool], list[str]] = {}  # (rank, whether experts) -> servers
    lacking: dict[_Share, dict[int, list[str]]] = {}  # share -> relay -> servers
    for server in places:
        if server.node is None:
            problem = (
                f"server {server.url} is not on a machine of the ranks, and memory handles work"
                " within one"
            )
            raise ConfigError("sglang.weight_transport", "ipc", problem, "set it to disk or tensor")
        first = server.node * ranks_per_node
        ranks = range(first, min(first + ranks_per_node, world))
        for number, (share, holders) in enumerate(_holders(parallel, world, ranks).items()):
            if holders:
                nearest = min(
                    holders, key=lambda rank: (_distance(rank - first, server.gpus), rank)
                )
                urls = servers_of.setdefault((nearest, share.expert is not None), [])
            else:
                urls = lacking.setdefault(share, {}).setdefault(ranks[number % len(ranks)], [])
            if server.url not in urls:
                urls.append(server.url)
    relays: dict[tuple[int, bool], tuple[Relay, ...]] = {}
    everywhere = _holders(parallel, world, range(world)) if lacking else {}
    for share, servers_of_rank in lacking.items():
        keys = [(rank, share.expert is not None) for rank in everywhere[share]]
        # One that exports it anyway, if there is one.
        origin = next((key for key in keys if key in servers_of), keys[0])
        servers_of.setdefault(origin, [])
        relays[origin] = tuple(
            Relay(rank, tuple(servers)) for rank, servers in servers_of_rank.items()
        )
    return numbered(
        [
            WeightSource(
                rank,
                shared=not experts,
                experts=experts,
                servers=tuple(servers_of[rank, experts]),
                relays=relays.get((rank, experts), ()),
            )
            for rank, experts in sorted(servers_of)
        ]
    )


@dataclass(frozen=True)
class _Share:
    """What one source of a stage sends: the experts of an expert-parallel rank; None: what is
    not an expert's.
    """

    stage: int
    expert: int | None


def _holders(parallel: ParallelConfig, world: int, ranks: range) -> dict[_Share, list[int]]:
    """The ranks among `ranks` that can send each share: the first of the tensor-parallel group that
    holds it.

    Megatron's order: tensor-parallel rank fastest, then context and data, the stages slowest; of
    experts: the expert-tensor rank fastest, then the expert-parallel rank, the replicas, the
    stages.
    """
    tensor = parallel.tensor_model_parallel_size
    per_stage = world // parallel.pipeline_model_parallel_size
    expert_tensor = parallel.expert_tensor_size
    expert = parallel.expert_model_parallel_size
    holders: dict[_Share, list[int]] = {}
    for stage in range(parallel.pipeline_model_parallel_size):
        held = [rank for rank in ranks if rank // per_stage == stage]
        holders[_Share(stage, None)] = [rank for rank in held if rank % tensor == 0]
        for number in range(expert):
            holders[_Share(stage, number)] = [
                rank
                for rank in held
                if rank % expert_tensor == 0 and rank // expert_tensor % expert == number
            ]
    return holders


def _distance(gpu: int, gpus: range) -> int:
    return 0 if gpu in gpus else min(abs(gpu - gpus[0]), abs(gpu - gpus[-1]))
