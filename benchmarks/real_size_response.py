"""One response of a server on one core: from its body on the wire to the packed micro-batch, time and memory."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import say
from benchmarks.real_size_figure import Figure, memory, reset_peak

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
        from megatron_gspo.models.rotary import Rotary
        from megatron_gspo.rollout.server_engine.server_api import RequestContext, ServedModel
        from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
        from megatron_gspo.routing_replay.routes import RouteShape

        shape = ModelShape(
            model_type="qwen3_moe", num_layers=LAYERS, hidden_size=2048, num_attention_heads=32, num_query_groups=4,
            head_dim=128, ffn_hidden_size=6144, vocab_size=WORDS, rms_norm_eps=1e-6, rotary=Rotary(1e6, 128),
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


def response_time(quick: bool) -> list[Figure]:
    """CPU time from the body to the packed micro-batch."""
    tokens, repeats = 32_768, 3 if quick else 7
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
    tokens = 32_768
    what = f"a response of {tokens:,} tokens with routes"
    response = Response(tokens)
    with Upstream(response_body(tokens)) as upstream, Connection(upstream.url) as connection:
        size = upstream.size
        response.sample(connection.body())  # imports, allocator
        gc.collect()
        before = reset_peak()
        response.sample(connection.body())
        peak = memory("VmHWM") - before
        tracemalloc.start()
        sample = response.sample(connection.body())
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    routes = sample.routed_experts.nbytes
    say(f"body {size / MIB:.1f} MiB, peak {peak / MIB:.1f} MiB, kept {kept / MIB:.1f}, routes {routes / MIB:.1f} MiB")
    return [
        Figure(f"{what}: received and checked, peak", peak / size, 2.2, "times the body"),
        Figure(f"{what}: kept", kept / routes, 1.1, "times its routes"),
    ]


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

    def body(self) -> bytearray:
        """The body of a response."""
        [body] = self.bodies(1, lambda body: body)
        return body

    def bodies(self, count: int, taken: Callable[[bytearray], Any]) -> list[Any]:
        """`taken(body)` of each of some responses, in the thread of the connection, as the rollout client does it."""

        async def take_all() -> list[Any]:
            return [taken(await self._client.post_for_bytes("/generate", {}, timeout=60, max_bytes=2**30))
                    for _ in range(count)]  # fmt: skip

        return self._loop.run(take_all())
