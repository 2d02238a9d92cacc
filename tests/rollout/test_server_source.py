"""Groups from servers: rank 0 is their client, every rank gets the samples or the error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_gspo.errors import EngineError, SharedEngineError
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from tests.support.distributed import run_distributed
from tests.support.random_samples import all_samples
from tests.support.scripted_servers import (
    PROMPTS,
    SAMPLING,
    ScriptedServers,
    collective_weights,
    keys,
    scripted_response,
    server_source,
)


def resends(rank: int, world: int) -> tuple[list, list]:
    """Servers that lose their weights between an update and a collect, and one update that all refuse."""
    servers = ScriptedServers(scripted_response, failures=[NoServerError("none is up")]) if rank == 0 else None
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
        assert servers.calls == ["wait"] and lines == ["none is up"] and servers.taken == [1, 1]
        assert source.metrics() == {"rollout/requests": 3.0}
    else:
        assert source.metrics() == {} and lines == []
    return versions, keys(all_samples(batch))


def test_servers_get_the_weights_again():
    (versions, groups), (_, others) = run_distributed(resends, 2)
    assert versions == [3, 3], "once after the refusal, once more for a server that lost them"
    assert groups == others == [(i, j, 1) for i in (0, 1) for j in (0, 1)]


def failing(rank: int, world: int, where: str) -> tuple[str, bool]:
    servers = ScriptedServers(scripted_response) if rank == 0 else None
    source = server_source(servers, recovery_timeout=0.0)
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
            if servers is not None:
                servers.fails = EngineError("sample 0/0: refused")
            source.submit(PROMPTS[:1], SAMPLING, seed=1)
            source.collect(1)
        if where == "check":
            source._vocab_size = 3
            source.submit(PROMPTS[:1], SAMPLING, seed=1)
            source.collect(1)
    except SharedEngineError as error:
        value = torch.ones(1)
        dist.all_reduce(value)  # the ranks can still communicate
        return str(error), float(value) == world
    return "", False


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("update", "the engine failed: ValueError: wrong shape"),
        ("no server", "none is up"),
        ("collect", "sample 0/0: refused"),
        ("check", "the model's vocabulary ends at 2"),
    ],
)
def test_an_error_of_rank_0_is_raised_on_every_rank(where, message):
    found = run_distributed(failing, 2, where)
    assert found[0] == found[1] and message in found[0][0] and found[0][1]


def colocated(rank: int, world: int) -> list[str]:
    servers = ScriptedServers(scripted_response)
    source = server_source(servers, colocated=True)
    source.update_weights(collective_weights, version=1)
    source.pause(keep=False)
    source.update_weights(collective_weights, version=2)
    source.submit(PROMPTS[:1], SAMPLING, seed=1)
    source.pause(keep=True)
    for request in (lambda: source.collect(1), lambda: source.generate(PROMPTS[:1], SAMPLING, seed=1),
                    lambda: source.score([np.arange(4)])):  # fmt: skip
        request()  # sends the weights again, which the servers have released
        source.pause(keep=True)
    source.close()
    return [*servers.calls, *(f"version {version}" for version, _ in servers.updates)]


def test_servers_on_the_trainers_gpus_release_their_memory_with_the_weights():
    assert run_distributed(colocated, 1) == [
        ["pause", "stop keep=True", *["pause"] * 4, "close", "version 1", *["version 2"] * 4]
    ]
