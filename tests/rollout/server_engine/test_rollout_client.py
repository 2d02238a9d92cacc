"""Several ranks as clients of the same servers, which implement SGLang's protocol and run in
rank 0's process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.rollout.server_engine import response_generator
from megatron_gspo.rollout.server_engine.rollout_client import (
    PoolState,
    RolloutClient,
)
from megatron_gspo.rollout.server_engine.server_pool import ServerState
from megatron_gspo.rollout.server_source import ServerSource
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.rollout.weight_sync import WeightSync
from megatron_gspo.servers.backoff import Backoff
from megatron_gspo.weight_transport.weight_update import make_transport
from tests.support.distributed import run_distributed
from tests.support.random_samples import all_samples
from tests.support.scripted_servers import collective_weights
from tests.support.sglang_generator import MODEL, SAMPLING, Generator, expected, prompts
from tests.support.waiting import wait_for

VERSION = 3


class Rank:
    """A rank of a run. servers: on rank 0. lines: of its log."""

    def __init__(
        self, folder: str, clients: Sequence[int], servers: Sequence[Generator], settings: Any
    ) -> None:
        self.rank = dist.get_rank()
        self.servers = servers
        self.lines = list[str]()
        urls = run_on_rank_zero(lambda: [server.url for server in servers])
        key = Path(folder) / f"key_{self.rank}"
        key.write_text(f"rank{self.rank}")
        given: dict[str, Any] = {
            "health_interval": 0.1,
            "health_timeout": 2.0,
            "recovery_timeout": 30.0,
        }
        given |= dict(
            urls=tuple(urls), weight_transport="tensor", api_key_file=str(key), **settings
        )
        config = ServerConfig(**given)
        self.client = None
        if self.rank in clients:
            share = clients.index(self.rank), len(clients)
            self.client = RolloutClient(
                urls, config, MODEL, str, api=SGLangAPI(), share=share, log=self.lines.append
            )
        transport = make_transport(config, SGLangAPI()) if self.rank == 0 else None
        sync = WeightSync(config, self.client, transport, log=self.lines.append)
        self.source = ServerSource(
            self.client, clients, sync, config, groups_per_step=2, log=self.lines.append
        )
        self.source.update_weights(collective_weights, version=VERSION)

    def serving(self) -> list[int]:
        """The ports of the servers that this rank's client may use."""
        return (
            sorted(int(s.url.rpartition(":")[2]) for s in self.client.pool.serving)
            if self.client
            else []
        )

    def requests(self) -> list[tuple[str, str]]:
        """(API key, body) of each request, on rank 0."""
        return [
            (sender, json.dumps(body, sort_keys=True))
            for server in self.servers
            for sender, body in zip(server.senders, server.bodies, strict=True)
        ]

    def change_servers(
        self, change: Callable[[Generator], Any], servers: slice = slice(None)
    ) -> None:
        """On rank 0, before any rank goes on."""
        for server in self.servers[servers]:
            change(server)
        dist.barrier()

    def wait_for_requests(self, count: int) -> None:
        """On every rank."""
        wait_for(
            lambda: not self.servers or sum(len(server.bodies) for server in self.servers) >= count
        )
        dist.barrier()


def on_rank(
    number: int,
    world: int,
    case: Callable[[Rank], Any],
    folder: str,
    clients: Sequence[int],
    num_servers: int,
    settings: Any,
) -> Any:
    response_generator._BACKOFF = Backoff(0.0)
    with ExitStack() as stack:
        servers = [stack.enter_context(Generator()) for _ in range(num_servers * (number == 0))]
        rank = Rank(folder, clients, servers, settings)
        stack.callback(rank.source.close)
        return case(rank)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Any]]:
    """`run(case, world, clients, num_servers=..., **settings)`: the values of `case(Rank)` by
    rank.
    """

    def start(
        case: Callable[[Rank], Any],
        world: int,
        clients: Sequence[int],
        num_servers: int = 1,
        **settings: Any,
    ) -> list[Any]:
        return run_distributed(on_rank, world, case, str(tmp_path), clients, num_servers, settings)

    return start


def close_gate(server: Generator) -> None:
    server.gate = False


def open_gate(server: Generator) -> None:
    server.gate = True


def facts(batch: Any) -> list[tuple]:
    return [
        (
            s.prompt_index,
            s.sample_index,
            s.response_ids.tolist(),
            s.rollout_log_probs.tolist(),
            s.token_versions.tolist(),
        )
        for s in all_samples(batch)
    ]


def right(versions: Sequence[int], count: int) -> list[tuple]:
    """The facts of `count` groups whose tokens have these versions."""
    return [
        (prompt.index, i, tokens := expected(prompt), [-t / 8 for t in tokens], list(versions))
        for prompt in prompts(count)
        for i in range(2)
    ]


def collects(rank: Rank) -> tuple:
    rank.source.submit(prompts(6), SAMPLING, seed=5)
    batch = rank.source.collect(6)
    return facts(batch), sorted(batch.held), rank.requests(), rank.source.metrics()


def test_each_client_requests_and_holds_its_share(run):
    of_one_client = run(collects, 3, (0,), 2)
    assert of_one_client[0][0] == right([VERSION] * 4, 6)
    assert [rank[1] for rank in of_one_client] == [
        list(range(12)),
        [],
        [],
    ]
    bodies = sorted(body for _, body in of_one_client[0][2])
    assert len(set(bodies)) == 12, "each with a seed of its own"
    for clients in ((0, 2), (0, 1, 2)):
        by_rank = run(collects, 3, clients, 2)
        assert all(rank[0] == of_one_client[0][0] for rank in by_rank), (
            "the same samples in the same order"
        )
        requests = by_rank[0][2]
        assert sorted(body for _, body in requests) == bodies, (
            "the same requests with the same seeds"
        )
        assert Counter(sender for sender, _ in requests) == {
            f"rank{rank}": 12 // len(clients) for rank in clients
        }
        assert [len(rank[1]) for rank in by_rank] == [
            12 // len(clients) * (rank in clients) for rank in range(3)
        ]
        assert [rank[3].get("rollout/requests") for rank in by_rank] == [
            12.0,
            None,
            None,
        ], "counted over the clients"


def sizes(rank: Rank) -> tuple[list[int], int]:
    """Sizes in bytes of the collectives of a collect, of responses of 4 and of 40 tokens;
    samples held. The servers answer after the first round of waiting, so that each collect has one.
    """
    seen: set[int] = set()
    for name in ("all_reduce", "all_gather", "broadcast"):
        real = getattr(dist, name)

        def record(*given: Any, real=real, name=name, **options: Any) -> Any:
            tensor = given[1] if name == "all_gather" else given[0]
            seen.add(tensor.numel() * tensor.element_size())
            return real(*given, **options)

        setattr(dist, name, record)
    wait_a_round = rank.source.round

    def wait_then_answer(action: Callable[[float], int]) -> int:
        value = wait_a_round(action)
        for server in rank.servers:
            open_gate(server)
        return value

    rank.source.round = wait_then_answer  # type: ignore[method-assign]
    sizes_by_length = []
    held = 0
    for length in (4, 40):
        rank.change_servers(close_gate)
        seen.clear()
        rank.source.submit(
            prompts(6), SamplingParams(n_samples_per_prompt=2, max_response_length=length), seed=5
        )
        batch = rank.source.collect(6)
        assert all(s.response_length == length for s in batch.samples)
        held = len(batch.held)
        sizes_by_length.append(sorted(seen))
    return sizes_by_length, held


def test_what_reaches_other_ranks_does_not_grow_with_the_responses(run):
    (short, long), held = run(sizes, 2, (0, 1))[0]
    assert short == long and max(short) < 2000 and held == 6
    assert 12 * 72 in short, "a row and a count for each sample"
    assert 4 * 8 in short, "a round of waiting"


def interrupted(rank: Rank) -> tuple:
    """All clients have requests in flight when new weights come."""
    rank.change_servers(close_gate)
    rank.source.submit(prompts(4), SAMPLING, seed=5)
    rank.wait_for_requests(8)
    rank.source.update_weights(collective_weights, version=VERSION + 1)
    rank.change_servers(open_gate)
    return facts(rank.source.collect(4)), rank.source.metrics()


def test_an_update_interrupts_the_requests_of_all_clients(run):
    for clients in ((0,), (0, 1)):
        by_rank = run(interrupted, 2, clients, 2)
        assert by_rank[0][0] == by_rank[1][0] == right([VERSION, *[VERSION + 1] * 3], 4)
        metrics = by_rank[0][1]
        assert metrics["rollout/continued"] == 8 and metrics["rollout/retries"] == 0


def broken_connection(rank: Rank) -> tuple:
    """Rank 1 does not reach the first server, and finds it down before the other one answers."""
    rank.change_servers(lambda server: server.refuses.add("rank1"), slice(1))
    rank.change_servers(close_gate)
    rank.source.submit(prompts(6), SAMPLING, seed=5)
    wait_for(lambda: rank.servers or len(rank.serving()) <= 1)
    dist.barrier()
    rank.change_servers(open_gate)
    collected = facts(rank.source.collect(6))
    return collected, rank.serving(), rank.lines, rank.requests()


def test_a_server_that_one_client_does_not_reach_serves_the_others(run):
    first, second = run(broken_connection, 2, (0, 1), 2, max_concurrent_requests=2)
    assert first[0] == second[0] == right([VERSION] * 4, 6)
    assert len(first[1]) == 2 and len(second[1]) == 1 and set(second[1]) < set(first[1])
    assert not any("down" in line for line in first[2])
    assert any("is down" in line for line in second[2])
    assert Counter(sender for sender, _ in first[3]) == {
        "rank0": 6,
        "rank1": 6,
    }, "nothing is lost or requested twice"


def other_weights(rank: Rank, sender: str) -> tuple:
    """The answer to one request of a rank has other weights."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["weight_version"] = "another:1"
        return answer

    rank.change_servers(lambda server: server.breaks_of.update({sender: [change]}))
    rank.source.submit(prompts(4), SAMPLING, seed=5)
    collected = facts(rank.source.collect(4))
    return collected, [server.updates for server in rank.servers], rank.source.metrics(), rank.lines


@pytest.mark.parametrize("sender", ["rank0", "rank1"])
def test_a_server_with_other_weights_is_reported_and_updated(run, sender):
    first, second = run(partial(other_weights, sender=sender), 2, (0, 1))
    assert first[0] == second[0] == right([VERSION] * 4, 4)
    assert first[1] == [2], "sent again"
    assert first[2]["rollout/stale_responses"] == 1
    assert any("is excluded until it has the weights" in line for line in first[3])


def hanging(rank: Rank) -> tuple:
    """The first server does not generate for rank 1 and answers everything else."""
    rank.change_servers(lambda server: server.hangs.update({"rank1", "/health"}), slice(1))
    rank.source.submit(prompts(6), SAMPLING, seed=5)
    collected = facts(rank.source.collect(6))
    return collected, rank.lines, rank.serving()


def test_a_server_that_hangs_for_another_client_is_found_by_rank_0(run):
    """Which has no request there itself any more."""
    first, second = run(hanging, 2, (0, 1), 2, health_timeout=1.1)
    assert first[0] == second[0] == right([VERSION] * 4, 6)
    assert any("is down" in line for line in first[1]) and len(first[2]) == len(second[2]) == 1


def test_clients_begin_with_different_servers_and_share_their_limit(server):
    urls = [server.url, "http://127.0.0.1:9", "http://127.0.0.1:10"]
    config = ServerConfig(urls=tuple(urls), max_concurrent_requests=8)
    for share, first, limit in (((0, 3), 0, 2), ((1, 3), 1, 2), ((2, 3), 2, 2), ((4, 9), 1, 1)):
        client = RolloutClient(
            urls, config, MODEL, str, api=SGLangAPI(), share=share, log=lambda line: None
        )
        order = [each.url for each in client.pool.servers]
        assert order == urls[first:] + urls[:first]
        assert client.pool._config.max_concurrent_requests == limit
        client.close()
        client.close()


def test_other_weights_that_are_found_between_report_and_reply_are_reported_next():
    """The owner's reply does not know of them yet."""
    url = "http://127.0.0.1:9"
    nothing = [[0], [0]]
    other_weights_found = [[0], [1]]
    client = RolloutClient(
        [url], ServerConfig(urls=(url,)), MODEL, str, api=SGLangAPI(), share=(1, 2)
    )
    [server] = client.pool.servers
    reply = PoolState("run:3", 3, {url: ServerState(alive=True, has_weights=True)})
    client.follow(reply)
    assert client.reports().tolist() == nothing and client.pool.serving
    client.loop.run(client.pool.mark_stale(server, "it answered with other weights"))
    client.follow(reply)
    assert not client.pool.serving and client.reports().tolist() == other_weights_found
    client.follow(PoolState("run:3", 3, {url: ServerState(alive=True, has_weights=False)}))
    assert not client.pool.serving and client.reports().tolist() == nothing, "once"
    client.follow(reply)
    assert client.pool.serving == [server]
    client.loop.run(client.pool.mark_stale(server, "it answered with other weights"))
    client.follow(PoolState("run:4", 4, reply.servers))
    assert client.pool.serving == [server]
    assert client.reports().tolist() == nothing, "new weights have replaced them"
    client.close()
