"""Samples on their way from the servers' answers to packed micro-batches: time and memory of a
rank's host.

Whole rollout batches over gloo between processes on one machine, without a model: the first rank of
a replica is the client of its share, and each of its ranks holds what the plan gives it. A pass's
log-probs are random numbers. Each figure has a target of its own and no peer.

    OMP_NUM_THREADS=1 python benchmarks/data_plane.py
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import fcntl
import functools
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.common import hardware, number, say, versions
from benchmarks.result_files import save

MIB = 2**20


@dataclass(frozen=True)
class Figure:
    """One figure; lower is better.

    unit: of `ours` and `target`. parts: what it was computed from, by name and unit.
    """

    what: str
    ours: float
    target: float
    unit: str
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.ours <= self.target

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def memory(field: str) -> int:
    """Bytes of this process by their name in /proc/self/status: VmRSS is held now, VmHWM was
    held at most.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> int:
    """Forget the most that was held; returns what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


# One response of an SGLang server, with the routes of Qwen3-30B-A3B.
LAYERS = 48
EXPERTS = 128
TOP = 8
WORDS = 151_936
VERSION = "00c0ffee:3"


def response_body(tokens: int, *, routes: bool = True) -> bytes:
    """A response of `tokens` tokens to a prompt of one, as SGLang writes it: JSON with routes
    in base64 of int32.
    """
    import pybase64

    draws = np.random.default_rng(0)
    ids = draws.integers(2, WORDS, tokens).tolist()
    log_probs = (-draws.exponential(size=tokens)).astype(np.float32).astype(float).tolist()
    meta: dict[str, Any] = {
        "id": "0",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": 1,
        "weight_version": VERSION,
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs, ids, strict=True)],
        "completion_tokens": tokens,
        "cached_tokens": 0,
    }
    if routes:
        offsets = draws.integers(EXPERTS, size=(tokens, LAYERS, 1), dtype=np.int32)
        chosen = (offsets + 13 * np.arange(TOP, dtype=np.int32)) % EXPERTS  # 8 different ones
        meta["routed_experts"] = pybase64.b64encode(chosen.astype("<i4").tobytes()).decode()
    return json.dumps(
        {"text": "word " * tokens, "output_ids": ids, "meta_info": meta}, separators=(",", ":")
    ).encode()


class Response:
    """What a client does with a response, from its body to the packed micro-batch."""

    def __init__(self, tokens: int, *, routes: bool = True) -> None:
        from megatron_gspo.config import SamplingParams
        from megatron_gspo.data.sample import Prompt
        from megatron_gspo.models import ModelShape
        from megatron_gspo.models.rotary import Rotary
        from megatron_gspo.rollout.server_engine.server_api import RequestContext, ServedModel
        from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
        from megatron_gspo.routing_replay.routes import RouteShape

        shape = ModelShape(
            model_type="qwen3_moe",
            num_layers=LAYERS,
            hidden_size=2048,
            num_attention_heads=32,
            num_query_groups=4,
            head_dim=128,
            ffn_hidden_size=6144,
            vocab_size=WORDS,
            rms_norm_eps=1e-6,
            rotary=Rotary(1e6, 128),
            max_position_embeddings=tokens + 1,
            tied_embeddings=False,
            moe_layers=(True,) * LAYERS,
            num_experts=EXPERTS,
            experts_per_token=TOP,
        )
        self.prompt = Prompt(0, np.array([5]), "p")
        self.tokens = tokens
        self.model = ServedModel(shape, (1,), return_routes=routes)
        self.is_routed = routes
        self.context = RequestContext("sample 0/0", 1, tokens, self.model, VERSION)
        self.sampling = SamplingParams(n_samples_per_prompt=1, max_response_length=tokens)
        self.routes = RouteShape(LAYERS, TOP, EXPERTS)
        self.api = SGLangAPI()

    def sample(self, body: bytes | bytearray) -> Any:
        """The checked sample."""
        from megatron_gspo.rollout.sample_checks import check_samples
        from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
        from megatron_gspo.routing_replay.routes import check_routes

        answer = self.api.responses.decode_response(body, self.context)
        assert not self.api.responses.is_empty(answer, self.context)
        assert self.api.responses.response_version(answer, self.context) == VERSION
        partial = PartialResponse(self.prompt, 0, self.tokens)
        partial.add(self.api.responses.parse_response(answer, self.context), 3)
        sample = partial.to_sample(self.model, lambda ids: "")
        check_samples([sample], [self.prompt], self.sampling, vocab_size=WORDS)
        if self.is_routed:
            check_routes([sample], self.routes)
        return sample

    def packed(self, sample: Any) -> Any:
        """The micro-batch of this sample alone."""
        from megatron_gspo.data.packing import pack

        return pack([sample], num_sequences=1, num_tokens=self.tokens, routes=self.routes)


class Upstream:
    """A server in another process that answers every request with the same body."""

    def __init__(self, body: bytes) -> None:
        self.size = len(body)
        context = multiprocessing.get_context("spawn")
        pipe, server_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(server_pipe,), daemon=True)
        self._process.start()
        pipe.send_bytes(body)
        self.url = f"http://127.0.0.1:{pipe.recv()}"

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _serve(pipe: Any) -> None:
    from aiohttp import web

    body = pipe.recv_bytes()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


class Connection:
    """A client's connection to a server, used from one thread."""

    def __init__(self, url: str) -> None:
        from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session

        self._loop = EventLoop()
        self._session = self._loop.run(open_session())
        self._client = ServerClient(url, self._session)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._session.close())
        self._loop.close()

    def bodies(self, count: int, handle: Callable[[bytearray], Any]) -> list[Any]:
        """`handle(body)` of each of some responses, in the thread of the connection, as the
        rollout client does it.
        """

        async def handle_all() -> list[Any]:
            return [
                handle(
                    await self._client.post_for_bytes("/generate", {}, timeout=60, max_bytes=2**30)
                )
                for _ in range(count)
            ]

        return self._loop.run(handle_all())


GROUP = 16  # responses to a prompt
# The most that a rank of 8 may take, relative to one of 2 with the same share, to count as flat:
# our own choice.
_FLAT = 1.25
# What a rank imports. It is imported once, by the process that they are forked from.
_MODULES = (
    "torch.distributed",
    "megatron_gspo.config",
    "megatron_gspo.data.sample_batch",
    "megatron_gspo.loop.advantages",
    "megatron_gspo.loop.loss_masking",
    "megatron_gspo.loop.optimizer_steps",
    "megatron_gspo.loop.ratio_quantiles",
    "megatron_gspo.loop.rollout_correction",
    "megatron_gspo.loop.sample_metrics",
    "megatron_gspo.loop.step_plan",
    "megatron_gspo.mcore.micro_batches",
    "megatron_gspo.rollout.sample_exchange",
)


@dataclass(frozen=True)
class Measured:
    """Of one rank. seconds: of CPU by phase, sends and receives included. share: bytes of the
    samples that it trains. peak: most memory over what it held before. tokens: that it trains."""

    seconds: dict[str, float]
    share: int
    peak: int
    tokens: int


def data_plane(quick: bool) -> list[Figure]:
    """A rollout batch over data-parallel replicas: memory and CPU time of each rank's host,
    from answers to metrics.
    """
    # Two virtual cores may share a real one.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    length = 4096
    ranks = 8
    share = 32 if quick else 256
    turns = 1 if quick else 3
    figures = []
    # Without routes a small share would show what a step costs, not a token.
    for responses, routes, limit in ((share, True, 8.0), (256, False, 0.7)):
        on_two = measure_ranks(2, responses, length, routes=routes, turns=turns)
        on_all = measure_ranks(ranks, responses, length, routes=routes, turns=turns)
        routed = "with" if routes else "without"
        name = f"{responses * ranks:,} responses of {length:,} tokens {routed} routes over {ranks} ranks"
        slowest = _slowest(on_all)
        slowest_of_two = _slowest(on_two)
        figures.append(_per_million(name, on_all, limit))
        figures.append(
            Figure(
                f"{name}: the same, against 2 ranks",
                slowest / slowest_of_two,
                _FLAT,
                "times",
                {"2 ranks, s": slowest_of_two},
            )
        )
        figures.append(_held(name, on_all))
    pairs = measure_ranks(4, share, length, routes=True, turns=turns, tensor=2)
    name = (
        f"replicas of TP 2, {share * 2:,} responses of {length:,} tokens with routes over 4 ranks"
    )
    return [*figures, _per_million(name, pairs, 8.0), _held(name, pairs)]


def _per_million(name: str, turns_of_ranks: list[list[Measured]], limit: float) -> Figure:
    """CPU time of the slowest rank; its parts are those of the last turn of the rank that took
    longest in it.
    """
    last_turns = [turns[-1] for turns in turns_of_ranks]
    worst = max(last_turns, key=lambda measured: sum(measured.seconds.values()))
    phases = {f"{phase}, s": value / worst.tokens * 1e6 for phase, value in worst.seconds.items()}
    shown = (f"{phase} {value:.2f}" for phase, value in phases.items())
    say(f"{name}, per million tokens:", *shown)
    return Figure(
        f"{name}: a rank's host, per million tokens",
        _slowest(turns_of_ranks),
        limit,
        "s of one core",
        phases,
    )


def _held(name: str, turns_of_ranks: list[list[Measured]]) -> Figure:
    """Most memory of any rank in any turn."""
    most = max(
        (measured for turns in turns_of_ranks for measured in turns),
        key=lambda measured: (measured.peak - 200 * MIB) / measured.share,
    )
    parts = {"share, MiB": most.share / MIB, "peak, MiB": most.peak / MIB}
    beyond = (most.peak - 200 * MIB) / most.share
    return Figure(
        f"{name}: host memory of a rank beyond 200 MiB", beyond, 1.25, "times its share", parts
    )


def _slowest(turns_of_ranks: list[list[Measured]]) -> float:
    """CPU seconds per million tokens of the rank that takes longest; of each rank the median of
    its turns.
    """
    return max(
        statistics.median(
            sum(measured.seconds.values()) / measured.tokens * 1e6 for measured in turns
        )
        for turns in turns_of_ranks
    )


def measure_ranks(
    ranks: int, responses: int, length: int, *, routes: bool, turns: int = 1, tensor: int = 1
) -> list[list[Measured]]:
    """Each replica, of ``tensor`` of the ``ranks``, receives ``responses`` of ``length`` tokens, so
    many times; by rank and turn."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_MODULES])
    with (
        tempfile.TemporaryDirectory() as folder,
        Upstream(response_body(length, routes=routes)) as upstream,
    ):
        with context.Pool(ranks) as pool:
            run_rank = functools.partial(
                _rank,
                ranks=ranks,
                tensor=tensor,
                responses=responses,
                length=length,
                routes=routes,
                turns=turns,
                folder=folder,
                url=upstream.url,
            )
            return pool.map(run_rank, range(ranks), chunksize=1)


def _rank(
    rank: int,
    *,
    ranks: int,
    tensor: int,
    responses: int,
    length: int,
    routes: bool,
    turns: int,
    folder: str,
    url: str,
) -> list[Measured]:
    """One rank's turns; see `measure_ranks`."""
    import torch
    import torch.distributed as dist

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
            return [
                _Host(connection, turn, groups, responses, length, routes).run()
                for _ in range(turns)
            ]
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _groups(tensor: int) -> Any:
    """This rank's groups: tensor-parallel ranks are neighbours. A collective of the world."""
    import torch.distributed as dist

    ranks = range(dist.get_world_size())
    alone, _ = dist.new_subgroups_by_enumeration([[rank] for rank in ranks])
    if tensor == 1:
        return SimpleNamespace(
            tp=alone, cp=alone, pp=alone, dp=dist.group.WORLD, is_last_stage=True
        )
    tp, _ = dist.new_subgroups_by_enumeration(
        [list(ranks[start : start + tensor]) for start in ranks[::tensor]]
    )
    dp, _ = dist.new_subgroups_by_enumeration(
        [list(ranks[first::tensor]) for first in range(tensor)]
    )
    return SimpleNamespace(tp=tp, cp=alone, pp=alone, dp=dp, is_last_stage=True)


class _Host:
    """One rank's work, phase by phase."""

    def __init__(
        self,
        connection: Connection,
        turn: IO[str],
        groups: Any,
        responses: int,
        length: int,
        routes: bool,
    ) -> None:
        import torch.distributed as dist

        from megatron_gspo.config import Config

        self.world = dist.group.WORLD
        self.groups = groups
        self.responses = responses
        self.routes = routes
        self.seconds: dict[str, float] = {}
        self.ratios: dict[str, Any] = {}
        self.connection = connection
        self.turn = turn
        self.client = Response(length, routes=routes)
        replicas = groups.dp.size()
        self.config = Config.from_dict(
            {
                "run_dir": "run",
                "model": {"path": "model"},
                "data": {"prompts": "prompts", "verifier": "exact_match"},
                "rollout": {
                    "rollout_batch_size": replicas * responses // GROUP,
                    "n_samples_per_prompt": GROUP,
                    "max_response_length": length,
                },
                "training": {
                    "steps": 1,
                    "global_batch_size": replicas * responses // 4,
                    "max_tokens_per_micro_batch": 4 * length,
                },
            }
        )

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
        plan, batch = self.distribute(self.receive(self.responses))
        columns = [*batch.inputs.arrays.values(), *batch.responses.arrays.values()]
        share = sum(column.nbytes for column in columns)
        batch = self.prepare(batch, plan)
        self.update(batch, plan)
        return Measured(self.seconds, share, memory("VmHWM") - before, batch.inputs.num_tokens)

    def receive(self, count: int) -> Any:
        """Receive, parse and check the servers' answers; one client at a time, whose data stay
        in the core's cache.
        """
        from megatron_gspo.data.sample_batch import SampleBatch

        count *= self.groups.tp.rank() == 0  # the others of a replica are no clients
        first = self.groups.dp.rank() * count
        places = range(first, first + count)
        with self.phase("receive and check"):
            fcntl.flock(self.turn, fcntl.LOCK_EX)
            samples = self.connection.bodies(count, self.client.sample)
            fcntl.flock(self.turn, fcntl.LOCK_UN)
            samples = [
                replace(
                    sample,
                    prompt_index=number // GROUP,
                    sample_index=number % GROUP,
                    reward=float(number % 3 == 0),
                )
                for number, sample in zip(places, samples, strict=True)
            ]
            return SampleBatch.gathered(samples, places, self.world)

    def distribute(self, batch: Any) -> tuple[Any, Any]:
        """Plan the step and move the samples."""
        from megatron_gspo.loop.step_plan import plan_step
        from megatron_gspo.mcore.micro_batches import packing_rules
        from megatron_gspo.rollout.sample_exchange import move_samples, replica_homes

        model = SimpleNamespace(
            sequence_parallel=False,
            virtual_pipeline_model_parallel_size=None,
            moe_token_dispatcher_type="alltoall",
        )
        with self.phase("plan and move"):
            rules = packing_rules(self.config.training, model, self.groups)
            homes = replica_homes(batch, self.groups.dp)
            plan = plan_step(batch, homes, self.config, rules, 0)
            return plan, move_samples(batch, plan.replica, self.groups)

    def prepare(self, batch: Any, plan: Any) -> Any:
        """The passes before the updates, masks, advantages."""
        from megatron_gspo.loop.advantages import with_advantages
        from megatron_gspo.loop.loss_masking import mask_samples
        from megatron_gspo.loop.rollout_correction import correct_mismatch, mismatch

        scores = self.scored(batch, plan.first_epoch, ())
        with self.phase("metrics"):
            mismatch(batch, scores, self.ratios)
        with self.phase("advantages"):
            batch = batch.with_column("old_log_probs", scores)
            batch, _ = mask_samples(batch, step=0, truncated=False)
            batch = with_advantages(batch, self.config.algorithm, max_response_length=10**9)
            return correct_mismatch(batch, self.config.algorithm)[0]

    def update(self, batch: Any, plan: Any) -> None:
        """Pack, collect and measure each mini-batch."""
        from megatron_gspo.loop.optimizer_steps import _add_ratios
        from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
        from megatron_gspo.loop.sample_metrics import sample_metrics

        mini_batches = [batch.select(rows) for rows, _ in plan.updates]
        log_probs = [
            self.scored(mini_batch, packing, ("old_log_probs",))
            for mini_batch, (_, packing) in zip(mini_batches, plan.updates, strict=True)
        ]
        with self.phase("metrics"):
            _add_ratios(self.ratios, mini_batches, log_probs)
            quantiles_over_ranks(self.ratios, batch)
            sample_metrics(batch, version=3, supervised=False)

    def scored(self, batch: Any, plan: Any, optional: tuple[str, ...]) -> np.ndarray:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    machine = hardware()
    # in a process of its own, so that its memory is its own
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        figures = pool.submit(data_plane, args.quick).result()
    for figure in figures:
        met = "yes" if figure.met else "NO"
        print(
            f"| {figure.what} | {number(figure.ours)} {figure.unit} | <= {figure.target:g} |"
            f" {met} |"
        )
    if args.json:
        rows = [figure.to_json() for figure in figures]
        today = datetime.date.today().isoformat()
        save(args.json, {"date": today, "hardware": machine, "versions": versions(), "rows": rows})


if __name__ == "__main__":  # its processes find the functions under the module's own name
    from benchmarks import data_plane as this_module

    this_module.main()
