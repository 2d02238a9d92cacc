"""Groups from an engine in the trainer's processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.in_process_source import InProcessSource
from tests.support.distributed import run_distributed
from tests.support.random_samples import all_samples
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_servers import (
    PROMPTS,
    SAMPLING,
    collective_weights,
    keys,
    scripted_response,
)


def in_process_shares(rank: int, world: int, shared: bool) -> tuple[list, list, dict, dict, str]:
    engine = ScriptedEngine(scripted_response)
    asked = []
    generate = engine.generate

    def recorded(prompts, sampling, *, seed):
        asked.extend(prompt.index for prompt in prompts)
        return generate(prompts, sampling, seed=seed)

    engine.generate = recorded
    source = InProcessSource(engine, vocab_size=1000, group=dist.group.WORLD if shared else None)
    source.submit(PROMPTS, SAMPLING, seed=1)
    batch = source.collect(5)
    assert sorted({s.prompt_index for s in batch.samples}) == sorted(asked), (
        "each rank holds what it generated"
    )
    source.update_weights(collective_weights, version=4)
    assert [version for version, _ in engine.updates] == [4]
    assert float(engine.updates[0][1]["a"].sum()) == 2.0 * world
    return (
        asked,
        keys(all_samples(batch)),
        source.score([np.arange(4)]),
        source.metrics(),
        source.engine_name,
    )


def test_ranks_share_the_prompts_or_generate_all():
    shared = run_distributed(in_process_shares, 2, True)
    alone = run_distributed(in_process_shares, 2, False)
    assert sorted(shared[0][0] + shared[1][0]) == [0, 1, 2, 3, 4]
    assert alone[0][0] == alone[1][0] == [0, 1, 2, 3, 4]
    assert shared[0][1:] == shared[1][1:] == alone[0][1:] == alone[1][1:]
    assert shared[0][2:] == ({}, {}, "tests.support.scripted_engine.ScriptedEngine")


def test_a_collect_generates_requests_of_one_seed_together():
    engine = ScriptedEngine(scripted_response)
    calls = []
    generate = engine.generate

    def recorded(prompts, sampling, *, seed):
        calls.append(([prompt.index for prompt in prompts], seed))
        return generate(prompts, sampling, seed=seed)

    engine.generate = recorded
    source = InProcessSource(engine, vocab_size=1000, name="inner.Engine")
    source.submit(PROMPTS[:2], SAMPLING, seed=1)
    source.submit(PROMPTS[2:4], SAMPLING, seed=2)
    assert source.pending() == [0, 1, 2, 3] and not calls, "nothing is generated before collect"
    assert len(source.collect(3)) == 6 and source.pending() == [3]
    assert calls == [([0, 1], 1), ([2], 2)]
    source.pause(keep=True)
    assert source.pending() == [3]
    source.close()
    assert engine.calls == ["close"] and source.engine_name == "inner.Engine"


def test_a_token_outside_the_vocabulary_is_refused():
    source = InProcessSource(ScriptedEngine(scripted_response), vocab_size=4)
    source.submit(PROMPTS[:1], SAMPLING, seed=1)
    with pytest.raises(EngineError, match="the model's vocabulary ends at 3"):
        source.collect(1)
