"""Every source of groups keeps the same contract, on every rank: in-process engines and servers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_gspo.config import SamplingParams, ServerConfig
from megatron_gspo.errors import EngineError, SharedEngineError
from megatron_gspo.rollout.group_source import GroupSource
from megatron_gspo.rollout.in_process_source import InProcessSource
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from megatron_gspo.rollout.server_source import ServerSource
from tests.support.distributed import run_distributed
from tests.support.samples import make_prompt
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_servers import ScriptedServers, scripted_response

SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=8)
PROMPTS = [make_prompt(i, text="ab" * (i + 1)) for i in range(5)]


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """A stream that is a collective, as the policy's."""
    for name in ("a", "b"):
        value = torch.ones(2)
        dist.all_reduce(value)
        yield name, value


def source_of(kind: str, rank: int, **options) -> tuple[GroupSource, ScriptedEngine | None]:
    if kind == "in process":
        engine = ScriptedEngine(scripted_response)
        return InProcessSource(engine, vocab_size=1000, group=dist.group.WORLD), engine
    servers = ScriptedServers(scripted_response, **options) if rank == 0 else None
    return server_source(servers), servers


def server_source(servers: ScriptedServers | None, **options) -> ServerSource:
    log = options.pop("log", print)
    config = ServerConfig(urls=("http://a:1",), **{"recovery_timeout": 5.0, **options})
    return ServerSource(servers, config, vocab_size=1000, groups_per_step=2, log=log)


def keys(samples) -> list[tuple[int, int, int]]:
    """(prompt, sample, seed) of each, as the response has them."""
    return [(s.prompt_index, int(s.response_ids[0]) - 5, int(s.response_ids[2]) - 7) for s in samples]


def contract(rank: int, world: int, kind: str) -> list:
    source, _ = source_of(kind, rank)
    source.update_weights(weights, version=3)
    source.submit(PROMPTS[:3], SAMPLING, seed=1)
    source.submit(PROMPTS[3:4], SAMPLING, seed=2)
    seen = [source.pending()]
    other = source.generate(PROMPTS[4:], SAMPLING, seed=9)  # apart from what is pending
    groups = source.collect(4)
    seen += [source.pending(), keys(other), [keys(group) for group in groups]]
    source.submit(PROMPTS[:2], SAMPLING, seed=1)
    source.pause(keep=True)
    seen += [source.pending()]
    source.pause(keep=False)
    seen += [source.pending(), source.collect(0)]
    with pytest.raises(ValueError, match=r"collect\(1\): only 0 groups were submitted"):
        source.collect(1)
    source.close()
    return seen


@pytest.mark.parametrize("kind", ["in process", "servers"])
def test_the_contract(kind):
    found = run_distributed(contract, 2, kind)
    assert found[0] == found[1]
    pending, left, other, groups, paused, dropped, nothing = found[0]
    assert pending == [0, 1, 2, 3] and left == [] and paused == [0, 1] and dropped == [] and nothing == []
    assert other == [(4, 0, 9), (4, 1, 9)]
    assert groups == [[(i, 0, seed), (i, 1, seed)] for i, seed in ((0, 1), (1, 1), (2, 1), (3, 2))]


def in_process_shares(rank: int, world: int, shared: bool) -> tuple[list, list, dict, dict, str]:
    engine, asked = ScriptedEngine(scripted_response), []
    generate = engine.generate
    engine.generate = lambda prompts, *rest, **more: asked.extend(p.index for p in prompts) or generate(
        prompts, *rest, **more
    )
    source = InProcessSource(engine, vocab_size=1000, group=dist.group.WORLD if shared else None)
    source.submit(PROMPTS, SAMPLING, seed=1)
    samples = [sample for group in source.collect(5) for sample in group]
    source.update_weights(weights, version=4)
    assert [version for version, _ in engine.updates] == [4]
    assert float(engine.updates[0][1]["a"].sum()) == 2.0 * world
    return asked, keys(samples), source.score([np.arange(4)]), source.metrics(), source.engine_name


def test_ranks_share_the_prompts_or_generate_all():
    shared, alone = run_distributed(in_process_shares, 2, True), run_distributed(in_process_shares, 2, False)
    assert sorted(shared[0][0] + shared[1][0]) == [0, 1, 2, 3, 4]
    assert alone[0][0] == alone[1][0] == [0, 1, 2, 3, 4]
    assert shared[0][1:] == shared[1][1:] == alone[0][1:] == alone[1][1:]
    assert shared[0][2:] == ({}, {}, "tests.support.scripted_engine.ScriptedEngine")


def resends(rank: int, world: int) -> tuple[list, list]:
    """Servers that lose their weights between an update and a collect, and one update that all refuse."""
    servers = ScriptedServers(scripted_response, failures=[NoServerError("none is up")]) if rank == 0 else None
    lines: list[str] = []
    source = server_source(servers, log=lines.append)
    source.update_weights(weights, version=3)
    if servers is not None:
        servers.lost_weights = True
    source.submit(PROMPTS[:2], SAMPLING, seed=1)
    groups = source.collect(2, oldest_version=1)
    scores = source.score([np.arange(4)])
    assert list(scores) == ["http://a"] and scores["http://a"][0].tolist() == [0, 0, 0]
    versions = [version for version, _ in servers.updates] if servers else []
    if servers is not None:
        assert servers.calls == ["wait"] and lines == ["none is up"] and servers.taken == [1, 1]
        assert source.metrics() == {"rollout/requests": 3.0}
    else:
        assert source.metrics() == {} and lines == []
    return versions, [keys(group) for group in groups]


def test_servers_get_the_weights_again():
    (versions, groups), (_, others) = run_distributed(resends, 2)
    assert versions == [3, 3], "once after the refusal, once more for a server that lost them"
    assert groups == others == [[(i, 0, 1), (i, 1, 1)] for i in (0, 1)]


def failing(rank: int, world: int, where: str) -> tuple[str, bool]:
    servers = ScriptedServers(scripted_response) if rank == 0 else None
    source = server_source(servers, recovery_timeout=0.0)
    try:
        if where == "update":
            if servers is not None:
                servers.failures = [ValueError("wrong shape")]
            source.update_weights(weights, version=1)
        if where == "no server":
            if servers is not None:
                servers.failures = [NoServerError("none is up")]
            source.update_weights(weights, version=1)
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
    source.pause(keep=False)
    source.submit(PROMPTS[:1], SAMPLING, seed=1)
    source.pause(keep=True)
    source.close()
    return servers.calls


def test_servers_on_the_trainers_gpus_release_their_memory():
    assert run_distributed(colocated, 1) == [["pause", "stop keep=True", "pause", "close"]]


