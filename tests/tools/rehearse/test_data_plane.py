"""A step's data plane as one client of hundreds and thousands of GPUs: requests, rewards, plan,
moves, metrics.

512 prompts x 16 responses, replicas of two tensor-parallel ranks. Apart from the sequences that
move, nothing that a rank exchanges with the world grows with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_gspo.algorithms import ratio_histograms
from megatron_gspo.config import Config, ServerConfig
from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.micro_batch_plan import PackingRules
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import ROW, SampleBatch, rows_of
from megatron_gspo.loop.advantages import with_advantages
from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
from megatron_gspo.loop.reward_scoring import VerifierRewards, balanced_scorers
from megatron_gspo.loop.sample_metrics import sample_metrics
from megatron_gspo.loop.step_plan import plan_step
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rewards.scorer import RewardScorer
from megatron_gspo.rollout.sample_codec import encode_samples
from megatron_gspo.rollout.sample_exchange import move_samples, replica_homes, split_prompts
from megatron_gspo.rollout.server_engine.rollout_client import PoolState
from megatron_gspo.rollout.server_engine.server_pool import ServerState
from megatron_gspo.rollout.server_source import ServerSource
from megatron_gspo.rollout.weight_sync import WeightSync
from megatron_gspo.tools.rehearse.records import Collective
from tests.support.samples import make_prompt, make_sample
from tests.support.scripted_engine import ScriptedResponse
from tests.support.scripted_servers import ScriptedServers
from tests.support.training_runs import base_config

from .scripted_world import Script, ScriptedWorld, scripted_world

MIB = 2**20
PROMPTS, N, TENSOR, RANK, SERVERS = 512, 16, 2, 10, 256  # RANK: of the sixth client
LENGTHS = np.random.default_rng(0).integers(1000, 4000, PROMPTS * N)


class Servers(ScriptedServers):
    def reports(self) -> np.ndarray:
        return np.zeros((2, SERVERS), dtype=np.int64)


def response(prompt: Prompt, number: int, seed: int) -> ScriptedResponse:
    length = int(LENGTHS[prompt.index * N + number])
    return ScriptedResponse([5] * length, [-1.0] * length, text="word " * (length // 2))


def config() -> Config:
    rollout = {
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": N,
        "max_response_length": 4096,
    }
    return Config.from_dict(
        base_config("model", Path("run"), rollout=rollout, training={"global_batch_size": 2048})
    )


def scorer() -> RewardScorer:
    made = RewardScorer.__new__(RewardScorer)
    made._failure_reward, made._pool, made._verifier = (
        None,
        None,
        lambda text, prompt: len(text) % 2,
    )
    made.verdicts = ()
    return made


def scripted_rows(prompts: list[Prompt], holder: np.ndarray) -> np.ndarray:
    """[N] as `rows_of` makes them of all clients' samples."""
    [like] = rows_of([make_sample(1, 1)])
    rows = np.full(PROMPTS * N, like, dtype=ROW)
    rows["prompt_index"], rows["sample_index"] = np.divmod(np.arange(len(rows)), N)
    rows["prompt_length"] = np.repeat([prompt.length for prompt in prompts], N)
    rows["response_length"] = rows["trained"] = LENGTHS
    rows["holder"], rows["reward"] = holder, np.nan
    rows["oldest_version"] = rows["newest_version"] = 0
    return rows


def step(
    world: ScriptedWorld, script: Script, prompts: list[Prompt], clients: range
) -> tuple[SampleBatch, list]:
    """The samples after they have moved, and those that this rank sent, with their replicas."""
    given, size = config(), dist.get_world_size()
    dp, tp = (dist.new_group(ranks) for ranks in (clients, [RANK, RANK + 1]))
    servers = ServerConfig(urls=tuple(f"http://node-{i}:1" for i in range(SERVERS)))
    client: Any = Servers(response)
    sync = WeightSync(servers, None, None)
    source = ServerSource(client, clients, sync, servers, groups_per_step=PROMPTS)
    holder = script.rows["holder"]
    with world.phase("ledger"):
        source.submit(ChosenPrompts.by_index(prompts, range(PROMPTS)), given.rollout, seed=0)
        batch = source.collect(PROMPTS)
    mine = np.flatnonzero(holder == RANK).tolist()
    assert list(batch.held) == mine and len(mine) >= N
    assert batch.table.tobytes() == script.rows.tobytes()
    with world.phase("rewards"):
        scorers = balanced_scorers(holder, size)
        script.exchange(holder, scorers, {}, 10_000)
        batch, _ = VerifierRewards(scorer(), "mine")(batch, prompts, Timers())
    with world.phase("plan"):
        homes = replica_homes(batch, dp)
        plan = plan_step(batch.lengths, homes, given, PackingRules(len(clients), 8192), 0)
    with world.phase("move"):
        target, kept = TENSOR * plan.replica, dict(batch.held)
        arrive = {
            int(rank): np.flatnonzero((target == RANK) & (holder == rank)).tolist()
            for rank in np.unique(holder[target == RANK])
            if rank != RANK
        }
        incoming = {
            rank: encode_samples([sample(i) for i in places], places)
            for rank, places in arrive.items()
        }
        script.exchange(holder, target, incoming, 100_000)
        moved = move_samples(batch, plan.replica, dp, (dist.new_group([RANK]), tp))
    assert list(moved.held) == np.flatnonzero(target == RANK).tolist()
    with world.phase("metrics"):
        moved = with_advantages(moved, given.algorithm, max_response_length=4096)
        sample_metrics(moved, version=0, supervised=False)
        masks = torch.from_numpy(np.concatenate([s.loss_mask for s in moved.samples]))
        owners = torch.from_numpy(
            np.repeat(np.arange(len(moved.held)), [s.response_length for s in moved.samples])
        )
        log_probs = torch.zeros(len(masks))
        quantiles_over_ranks(ratio_histograms(log_probs, log_probs, masks, owners), moved)
        script.exchange(np.arange(len(clients)), np.zeros(len(clients)), {}, 1000)
        moved.gather(b"a sample's text")
    return moved, [kept[i] for i in mine if target[i] != RANK]


def sample(i: int) -> Sample:
    return make_sample(4, int(LENGTHS[i]), prompt_index=i // N, sample_index=i % N)


def over_a_mib(calls: list[Collective]) -> list[Collective]:
    return [call for call in calls if call.bytes > MIB or call.dtype == "object"]


@pytest.mark.parametrize("size", [512, 4096])
def test_a_client_exchanges_little_with_the_world_besides_sequences(size: int) -> None:
    clients = range(0, size, TENSOR)
    prompts = [make_prompt(i) for i in range(PROMPTS)]
    shares = split_prompts(prompts, len(clients))
    of_prompt = {i: TENSOR * number for number, own in enumerate(shares) for i in own}
    holder = np.repeat([of_prompt[i] for i in range(PROMPTS)], N)
    own = shares[RANK // TENSOR]
    others = np.array([i not in own for i in range(PROMPTS)], dtype=np.int64)
    script = Script(scripted_rows(prompts, holder), TENSOR, others)
    state = PoolState(
        "0", 0, {f"http://node-{i}:1": ServerState(True, True, "0") for i in range(SERVERS)}
    )
    with scripted_world(RANK, size, script, state) as world:
        moved, sent = step(world, script, prompts, clients)
    assert len(moved) == PROMPTS * N and all(s.advantages is not None for s in moved.samples)
    calls = [call for call in world.calls if len(call.ranks) >= len(clients)]
    assert {call.phase for call in calls} == {"ledger", "rewards", "plan", "move", "metrics"}
    states = [call for call in calls if call.op == "broadcast" and call.phase == "ledger"]
    assert 0 < max(call.bytes for call in states) < MIB / 8
    [sequences] = [call for call in calls if call.phase == "move" and call.op == "alltoall_base"]
    assert over_a_mib([call for call in calls if call not in (sequences, *states)]) == []
    largest = max(call.bytes for call in calls if call not in (sequences, *states))
    assert largest == PROMPTS * N * 64, "the rows of samples"
    bytes_of = [len(encode_samples([one], [0])) for one in sent]
    assert 0.95 * sum(bytes_of) <= sum(sequences.sent) <= sum(bytes_of), "what stays is not sent"
    to_others = np.count_nonzero(sequences.sent) + np.count_nonzero(sequences.received)
    assert 0 < to_others <= len(sent) + len(moved.held), (
        "it connects to the ranks of its own sequences"
    )


def test_a_large_collective_is_found() -> None:
    made = Collective("allgather", "world", tuple(range(64)), "uint8", MIB, (), "ledger")
    large = replace(made, bytes=MIB + 1)
    assert over_a_mib([made, large]) == [large]
