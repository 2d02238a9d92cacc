"""vLLM's endpoints for generation (`ServerAPI`)."""

from __future__ import annotations

from typing import Any

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.server_engine.server_api import (
    OTHER_SAMPLING,
    SCORE_BYTES_PER_TOKEN,
    Request,
    RequestContext,
    ResponseParser,
)
from megatron_gspo.rollout.vllm import response_parser
from megatron_gspo.servers.http_client import ServerClient

PATH = "/inference/v1/generate"


class VLLMAPI:
    """See `ServerAPI`."""

    responses: ResponseParser = response_parser

    def gives_log_probs(self, sampling: SamplingParams) -> bool:
        """See `ServerAPI.gives_log_probs`: processed log-probs are over the tokens that top-p
        and top-k leave.
        """
        return sampling.greedy or (sampling.top_p == 1 and not sampling.top_k)

    def generate_request(
        self, tokens: list[int], context: RequestContext, sampling: SamplingParams, seed: int
    ) -> Request:
        """See `ServerAPI.generate_request`."""
        params = {
            "max_tokens": context.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            **OTHER_SAMPLING,
            "stop_token_ids": list(context.model.stop_ids),
            "ignore_eos": True,  # the same end tokens on every engine: those above
            "seed": seed,
            "logprobs": 0 if context.log_probs else None,
            "routed_experts_prompt_start": context.routes_start,
        }
        return _request(
            tokens, params, response_parser.max_response_bytes(context), context.model.adapters
        )

    def prefill_request(self, tokens: list[int], context: RequestContext) -> Request:
        """See `ServerAPI.prefill_request`. vLLM generates at least one token."""
        params, max_bytes = (
            {"max_tokens": 1, "temperature": 0.0},
            response_parser.max_response_bytes(context),
        )
        return _request(tokens, params, max_bytes, context.model.adapters)

    def score_request(self, tokens: list[int], context: RequestContext) -> Request:
        """See `ServerAPI.score_request`."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        max_bytes = response_parser.max_response_bytes(context) + SCORE_BYTES_PER_TOKEN * len(
            tokens
        )
        return _request(tokens, params, max_bytes, context.model.adapters)

    async def weight_version(self, server: ServerClient, *, timeout: float) -> str | None:
        """See `ServerAPI.weight_version`."""
        info = await server.get("/weight_info", timeout=timeout)
        version = info.get("weight_version") if isinstance(info, dict) else None
        return version if isinstance(version, str) else None

    async def check_health(self, server: ServerClient, *, timeout: float) -> None:
        """See `ServerAPI.check_health`. vLLM's /health generates nothing."""
        request = _request([0], {"max_tokens": 1, "temperature": 0.0}, 0)
        await server.post(request.path, request.body, timeout=timeout)

    async def abort_requests(self, server: ServerClient, *, timeout: float) -> None:
        """See `ServerAPI.abort_requests`."""
        await server.post("/abort_requests", {}, timeout=timeout)

    async def release_memory(self, server: ServerClient, *, timeout: float) -> None:
        """See `ServerAPI.release_memory`. Level 2 keeps no copy of the weights."""
        await server.post("/sleep?level=2", {}, timeout=timeout)

    async def restore_memory(self, server: ServerClient, kind: str, *, timeout: float) -> None:
        """See `ServerAPI.restore_memory`."""
        await server.post(f"/wake_up?tags={kind}", {}, timeout=timeout)


def _request(
    tokens: list[int], params: dict[str, Any], max_bytes: int, adapters: str = ""
) -> Request:
    body: dict[str, Any] = {"token_ids": tokens, "sampling_params": {**params, "detokenize": False}}
    return Request(PATH, body | {"model": adapters} if adapters else body, max_bytes)
