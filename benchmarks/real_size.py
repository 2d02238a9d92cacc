"""Costs at the size of real runs, on one core: each row is one figure of ours and its target, without a peer.

A function per measurement returns its rows; `MEASUREMENTS` lists them. Each runs in a process of its own, so that its
memory is its own.

    OMP_NUM_THREADS=1 python benchmarks/real_size.py            # or make bench-real-size
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import json
import multiprocessing
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.common import hardware, number, say, versions
from benchmarks.real_size_checkpoint import checkpoint_costs
from benchmarks.real_size_figure import Figure, memory, reset_peak
from benchmarks.result_files import save

MIB = 2**20


# One response of an SGLang server, with the routes of Qwen3-30B-A3B.

LAYERS, EXPERTS, TOP, WORDS = 48, 128, 8, 151_936
VERSION = "00c0ffee:3"


def response_body(tokens: int, *, routes: bool = True) -> bytes:
    """A response of `tokens` tokens to a prompt of one, as SGLang writes it: JSON with routes in base64 of int32."""
    import pybase64

    draws = np.random.default_rng(0)
    ids = draws.integers(2, WORDS, tokens).tolist()
    log_probs = (-draws.exponential(size=tokens)).astype(np.float32).astype(float).tolist()
    meta: dict[str, Any] = {
        "id": "0", "finish_reason": {"type": "length", "length": tokens}, "prompt_tokens": 1, "weight_version": VERSION,
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs, ids, strict=True)],
        "completion_tokens": tokens, "cached_tokens": 0,
    }  # fmt: skip
    if routes:
        offsets = draws.integers(EXPERTS, size=(tokens, LAYERS, 1), dtype=np.int32)
        chosen = (offsets + 13 * np.arange(TOP, dtype=np.int32)) % EXPERTS  # 8 different ones
        meta["routed_experts"] = pybase64.b64encode(chosen.astype("<i4").tobytes()).decode()
    return json.dumps({"text": "word " * tokens, "output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()


class Response:
    """What a client does with a response, from its body to the packed micro-batch."""

    def __init__(self, tokens: int, *, routes: bool = True) -> None:
        from megatron_gspo.config import SamplingParams
        from megatron_gspo.data.sample import Prompt
        from megatron_gspo.models import ModelShape
        from megatron_gspo.rollout.server_engine.server_api import RequestContext, ServedModel
        from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
        from megatron_gspo.routing_replay.routes import RouteShape

        shape = ModelShape(
            model_type="qwen3_moe", num_layers=LAYERS, hidden_size=2048, num_attention_heads=32, num_query_groups=4,
            head_dim=128, ffn_hidden_size=6144, vocab_size=WORDS, rms_norm_eps=1e-6, rope_theta=1e6,
            max_position_embeddings=tokens + 1, tied_embeddings=False, moe_layers=(True,) * LAYERS,
            num_experts=EXPERTS, experts_per_token=TOP,
        )  # fmt: skip
        self.prompt, self.tokens = Prompt(0, np.array([5]), "p"), tokens
        self.model, self.is_routed = ServedModel(shape, (1,), return_routes=routes), routes
        self.context = RequestContext("sample 0/0", 1, tokens, self.model, VERSION)
        self.sampling = SamplingParams(n_samples_per_prompt=1, max_response_length=tokens)
        self.routes = RouteShape(LAYERS, TOP, EXPERTS)
        self.api = SGLangAPI()

    def sample(self, body: bytes | bytearray) -> Any:
        """The checked sample."""
        from megatron_gspo.rollout.sample_checks import check_samples
        from megatron_gspo.rollout.server_engine.partial_response import PartialResponse
        from megatron_gspo.routing_replay.routes import check_routes

        answer = self.api.decode_response(body, self.context)
        assert not self.api.is_empty(answer, self.context)
        assert self.api.response_version(answer, self.context) == VERSION
        partial = PartialResponse(self.prompt, 0, self.tokens)
        partial.add(self.api.parse_response(answer, self.context), 3)
        sample = partial.to_sample(self.model, lambda ids: "")
        check_samples([sample], [self.prompt], self.sampling, vocab_size=WORDS)
        if self.is_routed:
            check_routes([sample], self.routes)
        return sample

    def packed(self, sample: Any) -> Any:
        """The micro-batch of this sample alone."""
        from megatron_gspo.data.packing import pack

        return pack([sample], num_sequences=1, num_tokens=self.tokens, routes=self.routes)


def response_time(quick: bool) -> list[Figure]:
    """CPU time from the body to the packed micro-batch."""
    tokens, repeats = (2048, 3) if quick else (32_768, 7)
    body, response, seconds = response_body(tokens), Response(tokens), []
    response.packed(response.sample(body))
    for _ in range(repeats):
        began = time.process_time()
        response.packed(response.sample(body))
        seconds.append(time.process_time() - began)
    return [Figure(f"a response of {tokens:,} tokens with routes: checked and packed", statistics.median(seconds), 0.25,
                   "s of one core")]  # fmt: skip


def response_memory(quick: bool) -> list[Figure]:
    """Peak from the first byte on the wire to the checked sample, and what is kept."""
    tokens = 2048 if quick else 32_768
    what = f"a response of {tokens:,} tokens with routes"
    response = Response(tokens)
    with Upstream(response_body(tokens)) as upstream:
        size = upstream.size
        response.sample(received(upstream.url))  # imports, allocator
        gc.collect()
        before = reset_peak()
        response.sample(received(upstream.url))
        peak = memory("VmHWM") - before
        tracemalloc.start()
        sample = response.sample(received(upstream.url))
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    routes = sample.routed_experts.nbytes
    say(f"body {size / MIB:.1f} MiB, peak {peak / MIB:.1f} MiB, kept {kept / MIB:.1f}, routes {routes / MIB:.1f} MiB")
    return [
        Figure(f"{what}: received and checked, peak", peak / size, 2.2, "times the body"),
        Figure(f"{what}: kept", kept / routes, 1.1, "times its routes"),
    ]


def data_plane(quick: bool) -> list[Figure]:
    """A rollout batch over 8 data-parallel ranks: memory and CPU time of each rank's host, from answers to metrics."""
    from benchmarks.data_plane import measure_ranks

    responses, length, most = (16, 512, 4) if quick else (256, 4096, 8)
    figures = []
    for routes, limit in ((True, 8.0), (False, 0.7)):
        kind = "with" if routes else "without"
        few, many = (measure_ranks(ranks, responses, length, routes=routes) for ranks in (2, most))
        seconds = [max(sum(one.seconds.values()) / one.tokens * 1e6 for one in found) for found in (few, many)]
        worst = max(many, key=lambda one: sum(one.seconds.values()))
        for phase, value in worst.seconds.items():
            say(f"{phase} {kind} routes: {value / worst.tokens * 1e6:.2f} s per million tokens")
        of = f"{responses * most:,} responses of {length:,} tokens {kind} routes over {most} ranks"
        figures.append(Figure(f"{of}: a rank's host, per million tokens", seconds[1], limit, "s of one core"))
        figures.append(Figure(f"{of}: the same, against 2 ranks", seconds[1] / seconds[0], 1.25, "times"))
        if routes:
            memory = max((one.peak - 200 * MIB) / one.share for one in many)
            say(f"share {worst.share / MIB:.0f} MiB, peak {worst.peak / MIB:.0f} MiB")
            figures.append(Figure(f"{of}: memory of a rank beyond 200 MiB", memory, 1.25, "times its share"))
    return figures


class Upstream:
    """A server in another process that answers every request with the same body."""

    def __init__(self, body: bytes) -> None:
        self.size = len(body)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        ours.send_bytes(body)
        self.url = f"http://127.0.0.1:{ours.recv()}"

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


def received(url: str) -> bytearray:
    """The body of the response of the server at `url`."""
    from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session

    async def ask() -> bytearray:
        async with await open_session() as session:
            client = ServerClient(url, session)
            return await client.post_for_bytes("/generate", {}, timeout=60, max_bytes=2**30)

    loop = EventLoop()
    try:
        return loop.run(ask())
    finally:
        loop.close()


MEASUREMENTS: tuple[Callable[[bool], list[Figure]], ...] = (
    response_time, response_memory, data_plane, checkpoint_costs
)  # fmt: skip


def measure(quick: bool, only: str = "") -> list[Figure]:
    """The figures of all measurements, or of the one with this name, each in a process of its own."""
    figures = []
    for function in MEASUREMENTS:
        if only not in ("", function.__name__):
            continue
        say(f"{function.__name__}: {(function.__doc__ or '').splitlines()[0]}")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            figures += pool.submit(function, quick).result()
    return figures


def table(figures: list[Figure]) -> str:
    """Markdown."""
    lines = ["| what | ours | target | met |", "| --- | --- | --- | --- |"]
    lines += [f"| {f.what} | {number(f.ours)} {f.unit} | <= {f.target:g} | {'yes' if f.met else 'NO'} |"
              for f in figures]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes; to see that it runs")
    names = [function.__name__ for function in MEASUREMENTS]
    parser.add_argument("--only", default="", choices=names, help="this measurement alone")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    machine = hardware()
    figures = measure(args.quick, args.only)
    print(table(figures))
    if args.json:
        save(args.json, {"date": datetime.date.today().isoformat(), "quick": args.quick, "hardware": machine,
                         "versions": versions(), "rows": [figure.to_json() for figure in figures]})  # fmt: skip


if __name__ == "__main__":
    main()
