"""Which rank hands which tensors to which server, against Megatron's own groups, in worlds
without processes.
"""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.parallel_state import RankGenerator

import megatron_gspo.mcore  # noqa: F401  Megatron's patches
from megatron_gspo.config import ConfigError, ParallelConfig
from megatron_gspo.weight_transport.weight_source import (
    Relay,
    ServerPlace,
    WeightSource,
    hand_over,
    numbered,
)
from tests.support.configs import parallel

NODE = 8
# (layout, ranks)
WHOLE_ON_A_NODE = {
    "one GPU": (parallel(), 1),
    "30B, one node": (parallel(tensor=4, expert=8), 8),
    "30B, one node of stages": (parallel(pipeline=4), 8),
    "30B, two nodes": (parallel(tensor=4, expert=8), 16),
    "stages and experts": (parallel(tensor=2, pipeline=2, expert=2), 8),
    "split experts": (parallel(tensor=2, expert=2, expert_tensor=2, context=2), 32),
    "replicas": (parallel(tensor=2, expert=2), 512),
    "many": (parallel(tensor=4, expert=8), 512),
}


def places(world: int, gpus: int) -> list[ServerPlace]:
    """Servers on all GPUs."""
    servers = []
    for first in range(0, world, gpus):
        node, gpu = divmod(first, NODE)
        servers.append(ServerPlace(f"http://node{node}:{gpu}", node, range(gpu, gpu + gpus)))
    return servers


def groups(layout: ParallelConfig, world: int) -> tuple[Any, Any, list[list[int]]]:
    """First ranks of the tensor-parallel groups; expert-parallel rank of each first rank of an
    expert-tensor-parallel group; the ranks of each stage: by Megatron."""
    pp = layout.pipeline_model_parallel_size
    rest = world // layout.tensor_model_parallel_size // pp // layout.context_parallel_size
    dense = RankGenerator(
        tp=layout.tensor_model_parallel_size,
        ep=1,
        dp=rest,
        pp=pp,
        cp=layout.context_parallel_size,
        order="tp-cp-ep-dp-pp",
    )
    etp = layout.expert_tensor_size
    ep = layout.expert_model_parallel_size
    sparse = RankGenerator(
        tp=etp, ep=ep, dp=world // etp // ep // pp, pp=pp, cp=1, order="tp-cp-ep-dp-pp"
    )
    experts = {rank: group.index(rank) for group in sparse.get_ranks("ep") for rank in group}
    firsts = {group[0] for group in sparse.get_ranks("tp")}
    stages = [[] for _ in range(pp)]
    for group in dense.get_ranks("pp"):
        for stage, rank in enumerate(group):
            stages[stage].append(rank)
    return (
        {group[0] for group in dense.get_ranks("tp")},
        {r: e for r, e in experts.items() if r in firsts},
        stages,
    )


@pytest.mark.parametrize("case", WHOLE_ON_A_NODE)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_every_server_gets_every_tensor_once_from_its_own_node(case: str, gpus: int) -> None:
    layout, world = WHOLE_ON_A_NODE[case]
    shared, experts, stages = groups(layout, world)
    servers = places(world, min(gpus, world))
    sources = hand_over(layout, world, NODE, servers)
    assert sources == numbered(sources)
    assert len({(s.rank, s.shared) for s in sources}) == len(sources)
    for server in servers:
        sources_of_server = [source for source in sources if server.url in source.servers]
        assert all(
            source.rank // NODE == server.node and source.shared is not source.experts
            for source in sources_of_server
        )
        assert {s.rank for s in sources_of_server if s.shared} <= shared
        assert {s.rank for s in sources_of_server if s.experts} <= set(experts)
        for ranks in stages:
            sources_of_stage = [source for source in sources_of_server if source.rank in ranks]
            assert sum(source.shared for source in sources_of_stage) == 1
            expert_ranks = sorted(
                experts[source.rank] for source in sources_of_stage if source.experts
            )
            assert expert_ranks == list(range(layout.expert_model_parallel_size))


def test_a_server_is_served_by_the_ranks_on_its_gpus_where_they_hold_the_tensors() -> None:
    layout = parallel(tensor=2, expert=2)
    by_rank = {(s.rank, s.experts): s.servers for s in hand_over(layout, 16, NODE, places(16, 2))}
    expected = {}
    for first in range(0, 16, 2):
        url = (f"http://node{first // NODE}:{first % NODE}",)
        expected |= {(first, False): url, (first, True): url, (first + 1, True): url}
    assert by_rank == expected


def test_a_rank_hands_its_tensors_to_all_servers_that_have_no_nearer_one() -> None:
    layout = parallel(pipeline=2)  # stage 0 on the ranks 0 to 3, stage 1 on 4 to 7
    sources = hand_over(layout, 8, NODE, places(8, 4))
    low = "http://node0:0"
    high = "http://node0:4"
    assert [(s.rank, s.shared, s.servers) for s in sources] == [
        (0, True, (low,)),
        (0, False, (low,)),
        (3, True, (high,)),
        (3, False, (high,)),
        (4, True, (low, high)),
        (4, False, (low, high)),
    ]


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        (parallel(tensor=4, pipeline=2, expert=4), 16),  # 30B
        (parallel(tensor=4, pipeline=8, expert=8), 512),  # 235B
        (parallel(tensor=4, expert=16), 512),
    ],
)
def test_a_node_without_a_part_of_the_model_gets_it_once_from_another_by_a_relay(
    layout: ParallelConfig, world: int
) -> None:
    shared, experts, stages = groups(layout, world)
    servers = places(world, 4)
    sources = hand_over(layout, world, NODE, servers)
    for server in servers:
        got = []  # (stage, expert-parallel rank, or None for what is not an expert's)
        for source in sources:
            for sender, urls in source.senders.items():
                assert urls is not None
                assert sender // NODE in {int(url[11:].split(":")[0]) for url in urls}
                if server.url in urls:
                    (stage,) = [
                        number for number, ranks in enumerate(stages) if source.rank in ranks
                    ]
                    assert source.rank in (experts if source.experts else shared)
                    got.append((stage, experts[source.rank] if source.experts else None))
        parts = [None, *range(layout.expert_model_parallel_size)]
        assert sorted(got, key=str) == sorted(
            ((s, expert_rank) for s in range(len(stages)) for expert_rank in parts), key=str
        )
    relayed = [source for source in sources if source.relays]
    parts = {(source.rank, source.experts) for source in relayed}
    most = len(stages) * (1 + layout.expert_model_parallel_size)
    assert len(parts) == len(relayed) <= most, "one origin of each part"
    for source in relayed:
        nodes = [rank // NODE for rank in (source.rank, *(relay.rank for relay in source.relays))]
        assert len(set(nodes)) == len(nodes), "one copy to each node"
    busiest = max(
        sum(relay.rank == rank for source in relayed for relay in source.relays)
        for rank in range(world)
    )
    assert busiest <= -(-len(relayed) // NODE) + 1, "the parts are spread over a node's ranks"


def test_a_server_on_no_machine_of_the_ranks_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match='= "ipc": server http://a:1 is not on a machine of the ranks.*; set it to',
    ):
        hand_over(parallel(), 1, 1, [ServerPlace("http://a:1", None, range(1))])


def test_sources_know_their_place_and_their_servers() -> None:
    infos: Any = [type("Info", (), {"url": url}) for url in ("a", "b")]
    every, some = numbered([WeightSource(3), WeightSource(1, servers=("b", "c"))])
    assert [(s.number, s.count, s.is_last) for s in (every, some)] == [(0, 2, False), (1, 2, True)]
    assert every.targets(infos, 3) == infos and some.targets(infos, 1) == infos[1:]
    far = WeightSource(3, servers=(), relays=(Relay(5, ("a",)), Relay(9, ("b",))))
    assert list(far.senders) == [5, 9]
    assert far.targets(infos, 9) == infos[1:], "it hands nothing over itself"
