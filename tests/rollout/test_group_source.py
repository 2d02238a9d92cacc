"""Every source of groups has the same contract, on every rank: in-process engines and servers."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_gspo.rollout.group_source import GroupSource, check_count, engine_name, split_groups
from megatron_gspo.rollout.in_process_source import InProcessSource
from tests.support.distributed import run_distributed
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


def test_samples_of_one_prompt_are_a_group():
    engine = ScriptedEngine(scripted_response)
    samples = engine.generate(PROMPTS[:3], SAMPLING, seed=1)
    groups = split_groups(samples, 2)
    assert [[(s.prompt_index, int(s.response_ids[0]) - 5) for s in group] for group in groups] == [
        [(i, 0), (i, 1)] for i in range(3)
    ]


def test_no_more_groups_can_be_collected_than_are_pending():
    check_count(2, 2)
    with pytest.raises(ValueError, match=r"collect\(3\): only 2 groups were submitted"):
        check_count(3, 2)


def test_an_engine_is_named_by_its_module_and_class():
    assert engine_name(ScriptedEngine) == "tests.support.scripted_engine.ScriptedEngine"
