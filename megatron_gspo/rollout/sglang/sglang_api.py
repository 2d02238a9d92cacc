"""SGLang's endpoints for generation (`ServerAPI`)."""

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
from megatron_gspo.rollout.sglang import response_parser
from megatron_gspo.servers.http_client import ServerClient

_PATH = "/generate"


class SGLangAPI:
    """See `ServerAPI`."""

    responses: ResponseParser = response_parser

    def gives_log_probs(self, sampling: SamplingParams) -> bool:
        """See `ServerAPI.gives_log_probs`."""
        return True

    def generate_request(
        self, tokens: list[int], context: RequestContext, sampling: SamplingParams, seed: int
    ) -> Request:
        """See `ServerAPI.generate_request`.

        The seed is used by servers with --enable-deterministic-inference only.
        """
        params = {
            "max_new_tokens": context.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            **OTHER_SAMPLING,
            "stop_token_ids": list(context.model.stop_ids),
            "sampling_seed": seed,
        }
        body = _body(tokens, params, context) | {"return_logprob": True}
        if context.model.return_routes:
            body |= {
                "return_routed_experts": True,
                "routed_experts_start_len": context.routes_start,
            }
        return Request(_PATH, body, response_parser.max_response_bytes(context))

    def prefill_request(self, tokens: list[int], context: RequestContext) -> Request:
        """See `ServerAPI.prefill_request`."""
        body = _body(tokens, {"max_new_tokens": 0, "temperature": 0.0}, context)
        return Request(_PATH, body, response_parser.max_response_bytes(context))

    def score_request(self, tokens: list[int], context: RequestContext) -> Request:
        """See `ServerAPI.score_request`."""
        params = {"max_new_tokens": 1, "temperature": 0.0}
        body = _body(tokens, params, context) | {"return_logprob": True, "logprob_start_len": 0}
        max_bytes = response_parser.max_response_bytes(context) + SCORE_BYTES_PER_TOKEN * len(
            tokens
        )
        return Request(_PATH, body, max_bytes)

    async def weight_version(self, server: ServerClient, *, timeout: float) -> str | None:
        """See `ServerAPI.weight_version`."""
        info = await server.get("/model_info", timeout=timeout)
        version = info.get("weight_version") if isinstance(info, dict) else None
        return version if isinstance(version, str) else None

    async def check_health(self, server: ServerClient, *, timeout: float) -> None:
        """See `ServerAPI.check_health`."""
        await server.get("/health", timeout=timeout)

    async def abort_requests(self, server: ServerClient, *, timeout: float) -> None:
        """See `ServerAPI.abort_requests`."""
        await server.post("/abort_request", {"rid": "", "abort_all": True}, timeout=timeout)

    async def release_memory(self, server: ServerClient, *, timeout: float) -> None:
        """See `ServerAPI.release_memory`."""
        await server.post(
            "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout=timeout
        )

    async def restore_memory(self, server: ServerClient, kind: str, *, timeout: float) -> None:
        """See `ServerAPI.restore_memory`."""
        await server.post("/resume_memory_occupation", {"tags": [kind]}, timeout=timeout)


def _body(tokens: list[int], params: dict[str, Any], context: RequestContext) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": params}
    return body | {"lora_path": context.model.adapters} if context.model.adapters else body
