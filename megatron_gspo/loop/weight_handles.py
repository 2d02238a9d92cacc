"""The sources of weights for servers that get memory handles (`weight_transport: ipc`), on the
machines of this run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch.distributed as dist

from megatron_gspo.config import Config, ServerConfig
from megatron_gspo.config.server_urls import check_url
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_launch import option
from megatron_gspo.weight_transport.sglang_payload import is_this_machine
from megatron_gspo.weight_transport.weight_source import ServerPlace, WeightSource, hand_over


def handle_sources(
    config: Config, urls: Sequence[str], ranks_per_node: int
) -> tuple[WeightSource, ...]:
    """The sources for the servers at `urls`. A collective. Raises ConfigError: see `hand_over`."""
    # As `ServerInfo` has them.
    started = bool(config.servers.num_servers)
    urls = [check_url(url) for url in urls]
    nodes = [0] * len(urls) if started else _nodes_of(urls, ranks_per_node)
    places = server_places(config.servers, urls, nodes, ranks_per_node)
    return hand_over(config.parallel, dist.get_world_size(), ranks_per_node, places)


def server_places(
    servers: ServerConfig, urls: Sequence[str], nodes: Sequence[int | None], ranks_per_node: int
) -> list[ServerPlace]:
    """Where the servers are. nodes: of each; the GPUs of servers that the run did not start are not
    known: those of a node are taken to share its GPUs evenly, in the order of `urls`."""
    places = []
    for number, (url, node) in enumerate(zip(urls, nodes, strict=True)):
        if servers.num_servers:
            count = SGLangLaunch.gpus_per_server(servers.server_args)
            default_gpu = 0 if servers.colocated else ranks_per_node
            first_gpu = int(option(servers.server_args, SGLangLaunch.gpu_option) or default_gpu)
            first = first_gpu + number * count
        else:
            count = max(ranks_per_node // nodes.count(node), 1)
            first = nodes[:number].count(node) * count
        places.append(ServerPlace(url, node, range(first, first + count)))
    return places


def _nodes_of(urls: Sequence[str], ranks_per_node: int) -> list[int | None]:
    """The first node that a URL names; None: no node of the ranks. A collective."""
    store = dist.distributed_c10d._get_default_store()
    node = dist.get_rank() // ranks_per_node
    if dist.get_rank() % ranks_per_node == 0:
        here = [is_this_machine(urlsplit(url).hostname or "") for url in urls]
        store.set(f"servers/on_node/{node}", json.dumps(here))

    def find() -> list[int | None]:
        nodes = range(-(-dist.get_world_size() // ranks_per_node))
        keys = [f"servers/on_node/{node}" for node in nodes]
        reached = [json.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return [next((node for node in nodes if reached[node][i]), None) for i in range(len(urls))]

    return run_on_rank_zero(find)
