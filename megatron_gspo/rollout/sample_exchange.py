"""Samples between ranks: generation of a share on each rank, and each sample to the replica
that trains it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample, stage_input
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.training_batch import TrainingBatch, TrainingBatchBuilder
from megatron_gspo.errors import EngineError, UserError, first_line
from megatron_gspo.parallel.collectives import group_rank, group_size
from megatron_gspo.parallel.host_exchange import (
    broadcast_along,
    exchange_bytes,
    gather_rows_of_ranks,
    sum_over_ranks,
)
from megatron_gspo.parallel.rank_zero import first_failure
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.sample_codec import decode_samples, encode_samples
from megatron_gspo.rollout.top_codec import pair_bytes
from megatron_gspo.routing_replay.routes import RouteShape

# That a rank sends, or receives, in one round; a longer sample is a round of its own.
BUCKET_BYTES = 64 << 20
_TOKEN_BYTES = 32  # of a token without routes, about: id, mask, log-probs, versions, text


def split_prompts(prompts: Sequence[Prompt], num_ranks: int) -> list[list[int]]:
    """[rank] -> positions in `prompts`, ascending. Each position occurs once; counts differ by at
    most 1.

    Prompts are assigned in order of length, alternating the direction over the ranks, which
    balances the lengths. Deterministic.
    """
    lengths = [prompt.length for prompt in prompts]  # each is read once
    order = sorted(range(len(prompts)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn in range(0, len(order), num_ranks):
        dealt = order[turn : turn + num_ranks]
        ranks = range(num_ranks) if (turn // num_ranks) % 2 == 0 else range(num_ranks - 1, -1, -1)
        for position, rank in zip(dealt, ranks, strict=False):
            shares[rank].append(position)
    return [sorted(share) for share in shares]


def generate_on_ranks(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    seed: int,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> SampleBatch:
    """`engine.generate` with the prompts distributed over `group`: each rank holds its own,
    prompt-major positions.

    Every rank passes the same prompts. group None: this process alone. vocab_size: bound of the
    token ids. The samples are checked (`check_samples`). An exception of one rank is raised on all;
    on the others it is an EngineError with the rank. So no rank waits for one that failed.
    """
    size = group_size(group)
    share = split_prompts(prompts, size)[group_rank(group)]
    failure: Exception | None = None
    samples: list[Sample] = []
    try:
        samples = _generate(engine, [prompts[i] for i in share], sampling, seed, vocab_size)
    except Exception as error:
        if size == 1:
            raise
        failure = error
    failed = first_failure(first_line(failure) if failure is not None else "", group)
    if failure is not None:
        raise failure
    if failed is not None:
        raise EngineError(f"generation failed on rank {failed[0]} of the group: {failed[1]}")
    n = sampling.n_samples_per_prompt
    return SampleBatch.gathered(samples, [i * n + j for i in share for j in range(n)], group)


def _generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    seed: int,
    vocab_size: int | None,
) -> list[Sample]:
    """This process's samples, checked. ValueError and OSError of the engine become EngineError."""
    try:
        samples = engine.generate(prompts, sampling, seed=seed)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        name = type(engine).__name__
        raise EngineError(
            f"the engine {name} failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    check_samples(samples, prompts, sampling, vocab_size=vocab_size)
    return samples


def replica_homes(batch: SampleBatch, dp: dist.ProcessGroup) -> np.ndarray | None:
    """[N] the replica that has each sample, as a rank in `dp`; None where every rank has all. A
    collective of `batch.group`."""
    if batch.group is None:
        return None
    replicas = np.zeros(group_size(batch.group), dtype=np.int64)
    replicas[group_rank(batch.group)] = group_rank(dp)
    return sum_over_ranks(replicas, batch.group)[batch.table["holder"]]


class ReplicaGroups(Protocol):
    """Process groups of a rank: `dp` joins it with its counterparts in the other replicas; the
    ranks of its own replica are those of `pp` x `cp` x `tp`."""

    @property
    def dp(self) -> dist.ProcessGroup: ...

    @property
    def pp(self) -> dist.ProcessGroup: ...

    @property
    def cp(self) -> dist.ProcessGroup: ...

    @property
    def tp(self) -> dist.ProcessGroup: ...


def move_samples(
    batch: SampleBatch,
    replica: np.ndarray,
    groups: ReplicaGroups,
    *,
    routes: RouteShape | None = None,
) -> TrainingBatch:
    """Send each sample to the replica that trains it. The last pipeline stage of a replica gets all
    columns, its other stages those that they read. The `group` of the result is `groups.dp`.

    Samples go in rounds of `BUCKET_BYTES`, from the ranks of `batch.group` that hold them, and
    `batch.held` is emptied as they leave. What its replica's first rank holds is not sent between
    replicas, nor is a round in which nothing moves. A collective of the world.

    Args:
        replica: [N] rank in `groups.dp`. The first rank of a replica receives the samples and
            passes them on.
        routes: the layers whose routes this rank keeps; None, on every rank: all.
    """
    dp = groups.dp
    of_replica = (groups.pp, groups.cp, groups.tp)
    table = batch.table.copy()
    me = group_rank(dp)
    table["holder"] = replica
    expected = np.flatnonzero(replica == me)
    alone = all(group_size(group) == 1 for group in of_replica)
    if batch.group is None or (alone and group_size(dp) == 1):  # all are here
        layers = None if routes is None else routes.held_layers
        builder = TrainingBatchBuilder(table, expected)
        for position in expected.tolist():
            builder.add(position, _of_layers(batch.held.pop(position), layers))
        batch.held.clear()
        return builder.batch(dp)
    target = _first_ranks(dp, of_replica, batch.group)[replica]
    here = group_rank(batch.group)
    stays = (batch.table["holder"] == target) & alone
    rounds = np.full(len(batch), -1)
    rounds[~stays] = exchange_rounds(
        sample_bytes(batch)[~stays], batch.table["holder"][~stays], target[~stays], BUCKET_BYTES
    )
    stages = _layers_of_stages(routes if batch.table["has_routes"].any() else None, of_replica)
    stage = group_rank(groups.pp) if stages else 0
    is_last = not stages or stage == len(stages) - 1
    builder = TrainingBatchBuilder(
        table, expected, has_loss=is_last, has_tokens=is_last or stage == 0
    )
    leaving = dict(batch.held)
    batch.held.clear()  # so that a sample's memory is free once it has left
    for position in np.flatnonzero(stays).tolist():
        if position in leaving:
            builder.add(position, leaving.pop(position))
    for number in range(int(rounds.max(initial=-1)) + 1):
        moving = rounds == number
        arriving = [i for i in np.flatnonzero(moving & (target == here)).tolist() if i in leaving]
        local_samples = {i: leaving[i] for i in arriving}
        received = _send_round(
            leaving, np.flatnonzero(moving), batch.table["holder"], target, batch.group
        )
        senders = np.unique(batch.table["holder"][moving & (replica == me)]).tolist()
        arrived = {sender: payload for sender, payload in received.items() if len(payload)}
        for sender in senders:
            # The first rank of a replica has received it; the others get it from that one.
            passed = _passed_on(arrived.get(sender), of_replica, stages)
            if arrived and sender == here:
                for position, sample in local_samples.items():
                    builder.add(position, _on_stage(sample, 0, stages))
            else:
                for position, sample in decode_samples(passed):
                    builder.add(position, sample)
        del local_samples
    return builder.batch(dp, groups.pp if stages else None)


def exchange_rounds(
    sizes: np.ndarray, source: np.ndarray, target: np.ndarray, bucket: int
) -> np.ndarray:
    """[N] int64: the round in which each sample moves, such that no rank sends or receives more
    than about `bucket` bytes in one.

    Args:
        sizes: [N] bytes.
        source, target: [N] ranks.
    """
    sent: defaultdict[int, list[int]] = defaultdict(list)  # by round
    received: defaultdict[int, list[int]] = defaultdict(list)
    rounds = np.empty(len(sizes), dtype=np.int64)
    moves = zip(sizes.tolist(), source.tolist(), target.tolist(), strict=True)
    for i, (size, sender, receiver) in enumerate(moves):
        # The first round with room at both ends: they need not wait for other ranks' rounds.
        number = 0
        while not (
            _fits(sent[sender], number, size, bucket)
            and _fits(received[receiver], number, size, bucket)
        ):
            number += 1
        for used in (sent[sender], received[receiver]):
            used += [0] * (number + 1 - len(used))
            used[number] += size
        rounds[i] = number
    return rounds


def _fits(used: Sequence[int], number: int, size: int, bucket: int) -> bool:
    """Whether a sample of `size` bytes has room in a round that another one may be in.

    used: bytes of each round so far.
    """
    round_bytes = used[number] if number < len(used) else 0
    return not round_bytes or round_bytes + size <= bucket


def sample_bytes(batch: SampleBatch) -> np.ndarray:
    """[N] int64: what is sent of each sample, about, the same on every rank. A collective."""
    samples = batch.samples
    support = sum(s.support_ids.nbytes for s in samples if s.support_ids is not None)
    route_bytes, top_bytes, support_bytes = batch.max(
        _row_bytes([s.routed_experts for s in samples]),
        max(map(_top_bytes, samples), default=0),
        support / max(sum(s.response_length for s in samples), 1),
    )
    token_bytes = _TOKEN_BYTES + route_bytes * batch.table["has_routes"]
    sizes = batch.lengths * token_bytes + batch.table["response_length"] * (
        top_bytes + support_bytes
    )
    return sizes.astype(np.int64)


def _top_bytes(sample: Sample) -> int:
    """Bytes of a token's most likely ids and their log-probs."""
    ids, log_probs = sample.rollout_top_ids, sample.rollout_top_log_probs
    if ids is None or log_probs is None:
        return 0
    return ids.shape[1] * pair_bytes(ids, log_probs)


def _row_bytes(arrays: Sequence[np.ndarray | None]) -> int:
    """Bytes of a row of the first array that is there; 0 without any."""
    first = next((array for array in arrays if array is not None), None)
    return 0 if first is None else math.prod(first.shape[1:]) * first.itemsize


def _first_ranks(
    dp: dist.ProcessGroup, of_replica: Sequence[dist.ProcessGroup], group: dist.ProcessGroup
) -> np.ndarray:
    """[replicas] the rank in `group` of each replica's first rank; a collective of it."""
    first_ranks = np.zeros(group_size(dp), dtype=np.int64)
    if all(group_rank(within) == 0 for within in of_replica):
        first_ranks[group_rank(dp)] = group_rank(group)
    return sum_over_ranks(first_ranks, group)


def _send_round(
    leaving: MutableMapping[int, Sample],
    positions: np.ndarray,
    holder: np.ndarray,
    target: np.ndarray,
    group: dist.ProcessGroup | None,
) -> dict[int, np.ndarray]:
    """This rank's samples of a round to their targets; what came here, or was here, by sender. Sent
    samples are dropped."""
    payloads: dict[int, bytes] = {}
    from_here = [i for i in positions.tolist() if i in leaving]
    for rank in np.unique(target[from_here]).tolist():
        to_rank = [i for i in from_here if target[i] == rank]
        payloads[rank] = encode_samples([leaving[i] for i in to_rank], to_rank)
    for i in from_here:
        del leaving[i]
    links = np.stack([holder[positions], target[positions]], axis=1)
    return exchange_bytes(payloads, links, group)


def _layers_of_stages(
    routes: RouteShape | None, of_replica: Sequence[dist.ProcessGroup]
) -> Sequence[np.ndarray | None]:
    """The layers whose routes each stage of a pipeline keeps, None: all; empty without a pipeline.
    A collective of it."""
    if not of_replica or group_size(of_replica[0]) == 1:
        return []
    if routes is None:
        return [None] * group_size(of_replica[0])
    return gather_rows_of_ranks(np.array(routes.held_layers, dtype=np.int64), of_replica[0])


def _passed_on(
    payload: np.ndarray | None,
    of_replica: Sequence[dist.ProcessGroup],
    stages: Sequence[np.ndarray | None],
) -> np.ndarray:
    """What a replica's first rank received, on all of its ranks."""
    pipeline, *within_stage = of_replica
    if stages and all(group_rank(group) == 0 for group in within_stage):
        payload = _to_stages(payload, pipeline, stages)
    return broadcast_along(payload, within_stage)


def _to_stages(
    payload: np.ndarray | None, pipeline: dist.ProcessGroup, stages: Sequence[np.ndarray | None]
) -> np.ndarray:
    """The first stage's samples, on each stage what it reads of them, with the routes of its
    own layers.
    """
    payloads: dict[int, bytes] = {}
    if payload is not None:
        decoded = decode_samples(payload)
        positions = [position for position, _ in decoded]
        for stage in range(len(stages)):
            payloads[stage] = encode_samples(
                [_on_stage(sample, stage, stages) for _, sample in decoded], positions
            )
    return exchange_bytes(payloads, [(0, stage) for stage in range(len(stages))], pipeline)[0]


def _on_stage(sample: Sample, stage: int, stages: Sequence[np.ndarray | None]) -> Sample:
    """What a stage of a pipeline reads of a sample; all of it without one."""
    if not stages:
        return sample
    read = _of_layers(sample, stages[stage])
    return read if stage == len(stages) - 1 else stage_input(read, tokens=stage == 0)


def _of_layers(sample: Sample, layers: Sequence[int] | np.ndarray | None) -> Sample:
    """The sample with the routes of these layers alone; of all for None."""
    routes = sample.routed_experts
    if routes is None or layers is None or len(layers) == routes.shape[1]:
        return sample
    return replace(sample, routed_experts=np.take(routes, layers, axis=1))
