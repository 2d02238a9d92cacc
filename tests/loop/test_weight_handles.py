"""Who sends memory handles to which servers on the machines of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gspo.config import Config, ConfigError, ServerConfig
from megatron_gspo.loop.weight_handles import handle_sources, server_places
from tests.support.distributed import run_distributed
from tests.support.training_runs import base_config

HERE = "http://127.0.0.1:30000"
ALSO_HERE = "http://localhost:30001"
FAR = "http://192.0.2.1:30000"


def test_servers_of_the_run_have_the_gpus_of_their_arguments() -> None:
    def places(*args: str, colocated: bool = True) -> list[tuple[int | None, range]]:
        config = ServerConfig(num_servers=2, server_args=args, colocated=colocated)
        return [
            (server.node, server.gpus) for server in server_places(config, ["a", "b"], [0, 0], 8)
        ]

    assert places() == [(0, range(1)), (0, range(1, 2))]
    assert places("--tp-size", "4") == [(0, range(4)), (0, range(4, 8))]
    assert places("--tp-size", "2", "--base-gpu-id", "4") == [(0, range(4, 6)), (0, range(6, 8))]
    assert places(colocated=False) == [(0, range(8, 9)), (0, range(9, 10))]


def test_other_servers_share_the_gpus_of_their_node_in_their_order() -> None:
    config = ServerConfig(urls=("a", "b", "c", "d"))
    places = server_places(config, config.urls, [1, 0, 1, None], 8)
    assert [(server.url, server.gpus) for server in places] == [
        ("a", range(4)),
        ("b", range(8)),
        ("c", range(4, 8)),
        ("d", range(8)),
    ]


def sources_of(
    rank: int, world: int, cases: list[tuple[dict[str, int], list[str], int]]
) -> list[Any]:
    outcomes: list[Any] = []
    for layout, urls, ranks_per_node in cases:
        made = Config.from_dict(
            base_config(
                "model",
                Path("run"),
                parallel=layout,
                rollout={"engine": "sglang"},
                sglang={"urls": urls, "weight_transport": "ipc"},
            )
        )
        try:
            outcomes.append(handle_sources(made, urls, ranks_per_node))
        except ConfigError as error:
            outcomes.append(str(error))
    return outcomes


def test_every_rank_finds_the_same_sources_and_a_server_elsewhere_is_refused() -> None:
    """Two nodes of two ranks; a server at a loopback address is on the first."""
    stages = {"pipeline_model_parallel_size": 2}
    cases = [
        ({}, [HERE + "/", ALSO_HERE], 2),
        ({}, [HERE, FAR], 2),
        (stages, [HERE], 2),
        (stages, [HERE], 4),
    ]
    by_rank = run_distributed(sources_of, 4, cases)
    assert all(outcomes == by_rank[0] for outcomes in by_rank)
    near, far, split, whole = by_rank[0]
    assert [(s.rank, s.shared, s.servers) for s in near] == [
        (0, True, (HERE,)),
        (0, False, (HERE,)),
        (1, True, (ALSO_HERE,)),
        (1, False, (ALSO_HERE,)),
    ]
    assert far.startswith(
        f'sglang.weight_transport = "ipc": server {FAR} is not on a machine of the ranks'
    )
    assert [
        (s.rank, s.servers, [(relay.rank, relay.servers) for relay in s.relays]) for s in split
    ] == [(0, (HERE,), []), (0, (HERE,), []), (2, (), [(0, (HERE,))]), (2, (), [(1, (HERE,))])]
    assert [s.rank for s in whole] == [0, 0, 2, 2]
