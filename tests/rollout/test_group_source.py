"""Every source of groups has the same contract, on every rank: in-process engines and servers."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_gspo.rollout.group_source import GroupSource
from megatron_gspo.rollout.in_process_source import InProcessSource
from tests.support.distributed import run_distributed
from tests.support.random_samples import all_samples
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_servers import (
    PROMPTS,
    SAMPLING,
    ScriptedServers,
    collective_weights,
    keys,
    scripted_response,
    server_source,
)


def source_of(kind: str, rank: int, **options) -> tuple[GroupSource, ScriptedEngine | None]:
    if kind == "in process":
        engine = ScriptedEngine(scripted_response)
        return InProcessSource(engine, vocab_size=1000, group=dist.group.WORLD), engine
    servers = ScriptedServers(scripted_response, **options) if rank == 0 else None
    return server_source(servers), servers


def contract(rank: int, world: int, kind: str) -> list:
    source, _ = source_of(kind, rank)
    source.update_weights(collective_weights, version=3)
    source.submit(PROMPTS[:3], SAMPLING, seed=1)
    source.submit(PROMPTS[3:4], SAMPLING, seed=2)
    seen = [source.pending()]
    other = source.generate(PROMPTS[4:], SAMPLING, seed=9)  # apart from what is pending
    batch = source.collect(4)
    seen += [source.pending(), keys(all_samples(other)), keys(all_samples(batch))]
    seen += [
        batch.table[["prompt_index", "sample_index", "prompt_length", "response_length"]].tolist()
    ]
    source.submit(PROMPTS[:2], SAMPLING, seed=1)
    source.pause(keep=True)
    seen += [source.pending()]
    source.pause(keep=False)
    seen += [source.pending()]
    with pytest.raises(ValueError, match=r"collect\(1\): 0 groups were submitted"):
        source.collect(1)
    source.close()
    return seen


@pytest.mark.parametrize("kind", ["in process", "servers"])
def test_the_contract(kind):
    by_rank = run_distributed(contract, 2, kind)
    assert by_rank[0] == by_rank[1]
    pending, left, other, samples, table, paused, dropped = by_rank[0]
    assert pending == [0, 1, 2, 3] and left == [] and paused == [0, 1] and dropped == []
    assert other == [(4, 0, 9), (4, 1, 9)]
    assert samples == [(i, j, seed) for i, seed in ((0, 1), (1, 1), (2, 1), (3, 2)) for j in (0, 1)]
    assert table == [(i, j, PROMPTS[i].length, 4) for i in range(4) for j in (0, 1)], (
        "the groups' samples are together"
    )
