"""Groups from servers: one or several ranks are clients, every rank gets the rows of the samples or
the error.

With servers that speak their protocol: `server_engine/test_rollout_client.py`.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.sample_batch import ROW
from megatron_gspo.errors import EngineError, SharedEngineError
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from tests.support.distributed import run_distributed
from tests.support.random_samples import all_samples
from tests.support.samples import ReadItems
from tests.support.scripted_servers import (
    PROMPTS,
    SAMPLING,
    ScriptedServers,
    collective_weights,
    keys,
    scripted_response,
    server_source,
)
from tests.support.served_models import served_model

METRICS = {
    "rollout/requests": 3.0,
    "rollout/retries": 0.0,
    "rollout/refused": 0.0,
    "rollout/stale_responses": 0.0,
    "rollout/continued": 0.0,
    "rollout/discarded_tokens": 0.0,
    "rollout/cached_share": 0.25,
    "time/servers_busy": 1.5,
    "rollout/servers": 1.0,
}


def resends(rank: int, world: int) -> tuple[list, list]:
    """Servers that lose their weights between an update and a collect, and one update that all
    refuse.
    """
    servers = (
        ScriptedServers(scripted_response, failures=[NoServerError("none is up")])
        if rank == 0
        else None
    )
    lines: list[str] = []
    source = server_source(servers, log=lines.append)
    source.update_weights(collective_weights, version=3)
    if servers is not None:
        servers.lost_weights = True
    source.submit(PROMPTS[:2], SAMPLING, seed=1)
    batch = source.collect(2, oldest_version=1)
    assert len(batch.held) == (4 if rank == 0 else 0), "the client has them"
    scores = source.score([np.arange(4)])
    assert list(scores) == ["http://a"] and scores["http://a"][0].tolist() == [0, 0, 0]
    versions = [version for version, _ in servers.updates] if servers else []
    if servers is not None:
        assert servers.calls.count("wait") == 1 and lines == ["none is up"] and servers.waits == 2
    metrics = source.metrics()
    assert metrics == ({} if servers is None else METRICS) and bool(lines) == (rank == 0)
    return versions, keys(all_samples(batch))


def test_servers_get_the_weights_again():
    (versions, groups), (_, others) = run_distributed(resends, 2)
    assert versions == [3, 3], "once after the refusal, once more for a server that lost them"
    assert groups == others == [(i, j, 1) for i in (0, 1) for j in (0, 1)]


def failing(rank: int, world: int, where: str, clients: tuple[int, ...]) -> tuple[str, bool]:
    """An update fails on rank 0, anything else on the last client."""
    servers = ScriptedServers(scripted_response) if rank in clients else None
    source = server_source(servers, clients=clients, recovery_timeout=0.0)
    fails = servers if rank == clients[-1] else None
    try:
        if where == "update":
            if servers is not None:
                servers.failures = [ValueError("wrong shape")]
            source.update_weights(collective_weights, version=1)
        if where == "no server":
            if servers is not None:
                servers.failures = [NoServerError("none is up")]
            source.update_weights(collective_weights, version=1)
        if where == "collect":
            if fails is not None:
                fails.fails = EngineError("sample 0/0: refused")
            source.submit(PROMPTS[:2], SAMPLING, seed=1)
            source.collect(2)
        if where == "check":
            if fails is not None:
                fails.model = served_model(vocab_size=3)
            source.submit(PROMPTS[:2], SAMPLING, seed=1)
            source.collect(2)
    except SharedEngineError as error:
        value = torch.ones(1)
        dist.all_reduce(value)  # the ranks can still communicate
        return str(error), float(value) == world
    return "", False


@pytest.mark.parametrize("clients", [(0,), (0, 1)])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("update", "the engine failed: ValueError: wrong shape"),
        ("no server", "none is up"),
        ("collect", "sample 0/0: refused"),
        ("check", "the model's vocabulary ends at 2"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_every_rank(where, message, clients):
    by_rank = run_distributed(failing, 2, where, clients)
    assert by_rank[0] == by_rank[1] and message in by_rank[0][0] and by_rank[0][1]


def shared(rank: int, world: int, clients: tuple[int, ...], slow: float) -> tuple:
    """Groups of several calls, taken in others.

    slow: seconds that each group of the last client takes.
    """
    servers = (
        ScriptedServers(scripted_response, slow=slow * (rank == clients[-1]))
        if rank in clients
        else None
    )
    source = server_source(servers, clients=clients)
    source.update_weights(collective_weights, version=3)
    read = ReadItems(PROMPTS)
    prompts = ChosenPrompts.by_index(read, range(len(PROMPTS)))
    source.submit(prompts[:4], SAMPLING, seed=1)
    source.submit(prompts[4:], SAMPLING, seed=2)
    assert source.pending() == prompts.indices
    first = source.collect(5)
    source.submit(PROMPTS[:3], SAMPLING, seed=6)
    second = source.generate(prompts[3:], SAMPLING, seed=7)
    third = source.collect(3)
    assert bool(read.read) == (rank in clients), "the clients alone read prompts"
    batches = (first, second, third)
    # The reward is NaN.
    compared = [name for name in ROW.names if name not in ("reward", "holder")]
    versions = {state.training_version for state in servers.followed} if servers else set()
    collected = (
        [keys(all_samples(batch)) for batch in batches],
        [batch.table[compared].tolist() for batch in batches],
    )
    requested = servers.requested if servers else []
    return *collected, requested, [len(batch.held) for batch in batches], versions, source.metrics()


@pytest.mark.parametrize("slow", [0.0, 0.15])
def test_the_samples_do_not_depend_on_the_clients(slow):
    one, *idle = run_distributed(shared, 3, (0,), 0.0)
    assert one[0] == [
        [(i, j, seed) for i, seed in groups for j in (0, 1)]
        for groups in (
            ((0, 1), (1, 1), (2, 1), (3, 1), (4, 2)),
            ((3, 7), (4, 7)),
            ((0, 6), (1, 6), (2, 6)),
        )
    ]
    assert len(one[2]) == 10 and [rank[2] for rank in idle] == [[], []]
    for clients in ((0, 2), (0, 1, 2)):
        by_rank = run_distributed(shared, 3, clients, slow)
        assert all(rank[0] == one[0] for rank in by_rank), (
            "each sample once, in the order of its prompts"
        )
        rows = [[row for table in rank[1] for row in table] for rank in (one, *by_rank)]
        assert all(each == rows[0] for each in rows)
        requested = [rank[2] for rank in by_rank]
        assert sorted(sum(requested, [])) == sorted(one[2]), "each group is requested by one client"
        share = 10 // len(clients)
        assert all(
            abs(len(each) - share) <= 2 for rank, each in enumerate(requested) if rank in clients
        )
        assert [sum(rank[3]) for rank in by_rank] == [2 * len(each) for each in requested], (
            "who requests holds"
        )
        assert all(rank[4] == {3} for rank in by_rank[1:] if rank[2]), "rank 0 told its version"
        assert by_rank[0][5]["rollout/requests"] == 3.0 * len(clients) and by_rank[1][5] == {}


def shares(rank: int, world: int) -> list[list[int]]:
    """Of a source that has served requests, and of a new one, as after a resume; then of
    another seed.
    """
    used, new = (
        server_source(ScriptedServers(scripted_response), clients=(0, 1, 2)) for _ in range(2)
    )
    used.update_weights(collective_weights, version=3)
    used.generate(PROMPTS[:3], SAMPLING, seed=4)
    used.submit(PROMPTS[:2], SAMPLING, seed=5)
    return [used.own_share(PROMPTS, 9), new.own_share(PROMPTS, 9), new.own_share(PROMPTS, 8)]


def test_a_resumed_run_has_the_same_shares():
    by_rank = run_distributed(shares, 3)
    for before, after, other in by_rank:
        assert before == after != other
    assert sorted(sum((after for _, after, _ in by_rank), [])) == list(range(len(PROMPTS)))


def colocated(rank: int, world: int) -> list[str]:
    servers = ScriptedServers(scripted_response)
    gpu = dict(is_initialized=lambda: True, empty_cache=lambda: servers.calls.append("free"))
    with mock.patch.multiple(torch.cuda, **gpu):
        return _calls_when_colocated(servers)


def _calls_when_colocated(servers: ScriptedServers) -> list[str]:
    source = server_source(servers, colocated=True)
    source.update_weights(collective_weights, version=1)
    source.pause(keep=False)
    source.update_weights(collective_weights, version=2)
    source.submit(PROMPTS[:1], SAMPLING, seed=1)
    source.pause(keep=True)
    for request in (
        lambda: source.collect(1),
        lambda: source.generate(PROMPTS[:1], SAMPLING, seed=1),
        lambda: source.score([np.arange(4)]),
    ):
        request()  # sends the weights again, which the servers have released
        source.pause(keep=True)
    source.close()
    return [*servers.calls, *(f"version {version}" for version, _ in servers.updates)]


def test_servers_on_the_trainers_gpus_release_their_memory_with_the_weights():
    update = ["pause", "interrupt"]
    update_again = ["free", *update]  # what torch has kept of a step goes to the servers
    pause = ["release"]
    again = [*update_again, *pause]
    expected = [
        *update,
        *pause,
        *update_again,
        "pause",
        "stop keep=True",
        *pause,
        *again,
        *again,
        *again,
        "close",
    ]
    assert run_distributed(colocated, 1) == [[*expected, "version 1", *["version 2"] * 4]]
