"""What each rank's host does with a rollout batch, from the servers' answers to the metrics, without a model.

Gloo between processes on one machine. The first rank of a replica is the client of its share, and each of its ranks
holds what the plan gives it: replicas of one rank, and of two tensor-parallel ones. A pass's log-probs are random
numbers.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np

from benchmarks.common import say
from benchmarks.real_size_figure import Figure, memory, reset_peak
from benchmarks.real_size_response import Connection, Response, Upstream, response_body

GROUP = 16  # responses to a prompt
MIB = 2**20
# The most that a rank of 8 may take, relative to one of 2 with the same share, to count as flat: our own choice.
_FLAT = 1.25
# What a rank imports. It is imported once, by the process that they are forked from.
_MODULES = (
    "torch.distributed", "megatron_gspo.config", "megatron_gspo.data.sample_batch", "megatron_gspo.loop.advantages",
    "megatron_gspo.loop.loss_masking", "megatron_gspo.loop.optimizer_steps", "megatron_gspo.loop.ratio_quantiles",
    "megatron_gspo.loop.rollout_correction", "megatron_gspo.loop.sample_metrics", "megatron_gspo.loop.step_plan",
    "megatron_gspo.mcore.micro_batches", "megatron_gspo.rollout.sample_exchange",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Of one rank. seconds: of CPU by phase, sends and receives included. share: bytes of the samples that it trains.
    peak: most memory over what it held before. tokens: that it trains."""

    seconds: dict[str, float]
    share: int
    peak: int
    tokens: int


def data_plane(quick: bool) -> list[Figure]:
    """A rollout batch over data-parallel replicas: memory and CPU time of each rank's host, from answers to metrics."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # two virtual cores may share a real one
    length, most = 4096, 8
    share, turns = (32, 1) if quick else (256, 3)
    figures = []
    # Without routes a small share would show what a step costs, not a token.
    for responses, routes, limit in ((share, True, 8.0), (256, False, 0.7)):
        kind = "with" if routes else "without"
        few, many = (measure_ranks(ranks, responses, length, routes=routes, turns=turns) for ranks in (2, most))
        of = f"{responses * most:,} responses of {length:,} tokens {kind} routes over {most} ranks"
        slow, slow_of_two = _slowest(many), _slowest(few)
        figures.append(_per_million(of, many, limit))
        parts = {"2 ranks, s": slow_of_two}
        figures.append(Figure(f"{of}: the same, against 2 ranks", slow / slow_of_two, _FLAT, "times", parts))
        figures.append(_held(of, many))
    pairs = measure_ranks(4, share, length, routes=True, turns=turns, tensor=2)
    of = f"replicas of TP 2, {share * 2:,} responses of {length:,} tokens with routes over 4 ranks"
    return [*figures, _per_million(of, pairs, 8.0), _held(of, pairs)]


def _per_million(of: str, ranks: list[list[Measured]], limit: float) -> Figure:
    """CPU time of the slowest rank; its parts are those of the last turn of the rank that took longest in it."""
    worst = max((taken[-1] for taken in ranks), key=lambda one: sum(one.seconds.values()))
    phases = {f"{phase}, s": value / worst.tokens * 1e6 for phase, value in worst.seconds.items()}
    say(f"{of}, per million tokens:", *(f"{name} {value:.2f}" for name, value in phases.items()))
    return Figure(f"{of}: a rank's host, per million tokens", _slowest(ranks), limit, "s of one core", phases)


def _held(of: str, ranks: list[list[Measured]]) -> Figure:
    """Most memory of any rank in any turn."""
    most = max((one for taken in ranks for one in taken), key=lambda one: (one.peak - 200 * MIB) / one.share)
    parts = {"share, MiB": most.share / MIB, "peak, MiB": most.peak / MIB}
    beyond = (most.peak - 200 * MIB) / most.share
    return Figure(f"{of}: host memory of a rank beyond 200 MiB", beyond, 1.25, "times its share", parts)


def _slowest(ranks: list[list[Measured]]) -> float:
    """CPU seconds per million tokens of the rank that takes longest; of each rank the median of its turns."""
    return max(statistics.median(sum(one.seconds.values()) / one.tokens * 1e6 for one in taken) for taken in ranks)


def measure_ranks(ranks: int, responses: int, length: int, *, routes: bool, turns: int = 1, tensor: int = 1
                  ) -> list[list[Measured]]:  # fmt: skip
    """Each replica, of ``tensor`` of the ``ranks``, receives ``responses`` of ``length`` tokens, so many times; by rank
    and turn."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_MODULES])
    with tempfile.TemporaryDirectory() as folder, Upstream(response_body(length, routes=routes)) as upstream:
        with context.Pool(ranks) as pool:
            sizes = (ranks, tensor, responses, length, routes, turns)
            given = [(rank, sizes, folder, upstream.url) for rank in range(ranks)]
            return pool.starmap(_rank, given, chunksize=1)


def _rank(rank: int, sizes: tuple[int, int, int, int, bool, int], folder: str, url: str) -> list[Measured]:
    """sizes: see `measure_ranks`."""
    import torch
    import torch.distributed as dist

    ranks, tensor, responses, length, routes, turns = sizes
    torch.set_num_threads(1)
    gc.freeze()  # else the collections before each phase, which see what is imported, take most of the time
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    patience = timedelta(minutes=3)  # after which the others of a rank that failed end too
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    try:
        with Connection(url) as connection, (Path(folder) / "turn").open("w") as turn:
            groups = _groups(tensor)
            _Host(connection, turn, groups, GROUP, length, routes).run()  # imports, allocator
            return [_Host(connection, turn, groups, responses, length, routes).run() for _ in range(turns)]
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _groups(tensor: int) -> Any:
    """This rank's groups: tensor-parallel ranks are neighbours. A collective of the world."""
    import torch.distributed as dist

    one = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    if tensor == 1:
        return SimpleNamespace(tp=one, cp=one, pp=one, dp=dist.group.WORLD, is_last_stage=True, shared=())
    ranks = range(dist.get_world_size())
    tp, _ = dist.new_subgroups_by_enumeration([list(ranks[start : start + tensor]) for start in ranks[::tensor]])
    dp, _ = dist.new_subgroups_by_enumeration([list(ranks[first::tensor]) for first in range(tensor)])
    return SimpleNamespace(tp=tp, cp=one, pp=one, dp=dp, is_last_stage=True, shared=(None, None, tp))


class _Host:
    """One rank's work, phase by phase."""

    def __init__(
        self, connection: Connection, turn: IO[str], groups: Any, responses: int, length: int, routes: bool
    ) -> None:
        import torch.distributed as dist

        from megatron_gspo.config import Config

        self.world, self.groups = dist.group.WORLD, groups
        self.responses, self.routes = responses, routes
        self.seconds: dict[str, float] = {}
        self.connection, self.turn, self.client = connection, turn, Response(length, routes=routes)
        replicas = groups.dp.size()
        self.config = Config.from_dict({
            "run_dir": "run", "model": {"path": "model"}, "data": {"prompts": "prompts", "verifier": "exact_match"},
            "rollout": {"rollout_batch_size": replicas * responses // GROUP, "n_samples_per_prompt": GROUP,
                        "max_response_length": length},
            "training": {"steps": 1, "global_batch_size": replicas * responses // 4,
                         "max_tokens_per_micro_batch": 4 * length},
        })  # fmt: skip

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. Ranks wait for each other before it, so that waiting is not counted."""
        import torch.distributed as dist

        gc.collect()
        dist.barrier()
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

    def run(self) -> Measured:
        gc.collect()
        before = reset_peak()
        batch = self.receive(self.responses)
        plan, batch = self.distribute(batch)
        share = sum(sum(v.nbytes for v in vars(s).values() if isinstance(v, np.ndarray)) for s in batch.samples)
        batch = self.prepare(batch, plan)
        self.update(batch, plan)
        return Measured(self.seconds, share, memory("VmHWM") - before, int(sum(s.length for s in batch.samples)))

    def receive(self, count: int) -> Any:
        """Receive, parse and check the servers' answers; one client at a time, whose data stay in the core's cache."""
        from megatron_gspo.data.sample_batch import SampleBatch

        count *= self.groups.tp.rank() == 0  # the others of a replica are no clients
        first = self.groups.dp.rank() * count
        places = range(first, first + count)
        with self.phase("receive and check"):
            fcntl.flock(self.turn, fcntl.LOCK_EX)
            samples = self.connection.bodies(count, self.client.sample)
            fcntl.flock(self.turn, fcntl.LOCK_UN)
            samples = [replace(sample, prompt_index=number // GROUP, sample_index=number % GROUP,
                               reward=float(number % 3 == 0))
                       for number, sample in zip(places, samples, strict=True)]  # fmt: skip
            return SampleBatch.gathered(samples, places, self.world)

    def distribute(self, batch: Any) -> tuple[Any, Any]:
        """Plan the step and move the samples."""
        from megatron_gspo.loop.step_plan import plan_step
        from megatron_gspo.mcore.micro_batches import packing_rules
        from megatron_gspo.rollout.sample_exchange import move_samples, replica_homes

        model = SimpleNamespace(sequence_parallel=False, virtual_pipeline_model_parallel_size=None,
                                moe_token_dispatcher_type="alltoall")  # fmt: skip
        with self.phase("plan and move"):
            rules = packing_rules(self.config.training, model, self.groups)
            plan = plan_step(batch.lengths, replica_homes(batch, self.groups.dp), self.config, rules, 0)
            return plan, move_samples(batch, plan.replica, self.groups.dp, self.groups.shared)

    def prepare(self, batch: Any, plan: Any) -> Any:
        """The passes before the updates, masks, advantages."""
        from megatron_gspo.loop.advantages import with_advantages
        from megatron_gspo.loop.loss_masking import mask_samples
        from megatron_gspo.loop.rollout_correction import correct_mismatch, mismatch

        scores = self.scored(batch, plan.whole, ())
        with self.phase("metrics"):
            mismatch(batch, scores)
        with self.phase("advantages"):
            batch = batch.map(lambda i, sample: replace(sample, old_log_probs=scores[i]))
            batch, _ = mask_samples(batch, step=0, truncated=False)
            batch = with_advantages(batch, self.config.algorithm, max_response_length=10**9)
            return correct_mismatch(batch, self.config.algorithm)[0]

    def update(self, batch: Any, plan: Any) -> None:
        """Pack, collect and measure each mini-batch."""
        from megatron_gspo.loop.optimizer_steps import _added
        from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
        from megatron_gspo.loop.sample_metrics import sample_metrics

        ratios: dict[str, Any] = {}
        for rows, packing in plan.updates:
            part = batch.select(rows)
            found: Any = SimpleNamespace(log_probs=self.scored(part, packing, ("old_log_probs",)))
            with self.phase("metrics"):
                ratios = _added(ratios, part, found)
        with self.phase("metrics"):
            quantiles_over_ranks(ratios, batch)
            sample_metrics(batch, version=3, supervised=False)

    def scored(self, batch: Any, plan: Any, optional: tuple[str, ...]) -> dict[int, np.ndarray]:
        """Pack the micro-batches and collect a number for each of their tokens."""
        import torch

        from megatron_gspo.mcore.micro_batches import planned_micro_batches, values_of_replica

        shape = self.client.routes if self.routes else None
        packed = planned_micro_batches(batch, plan, self.groups, optional=optional, routes=shape)
        values = []
        with self.phase("pack"):
            for micro_batch in packed.batches:
                values.append(-torch.rand(len(micro_batch.tokens)))
                del micro_batch
        with self.phase("collect"):
            return values_of_replica(values, packed.layouts, batch, self.groups)
