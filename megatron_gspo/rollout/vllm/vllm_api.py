"""vLLM's endpoints (`ServerAPI`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.server_engine.endpoint_answers import (
    count,
    get_object,
    has_endpoint,
    positive,
)
from megatron_gspo.rollout.server_engine.server_api import (
    OTHER_SAMPLING,
    Request,
    RequestContext,
    ResponseParser,
    ServerAPI,
    score_bytes,
)
from megatron_gspo.rollout.vllm import response_parser
from megatron_gspo.servers.http_client import JsonObject, ServerClient, ServerError
from megatron_gspo.weight_transport.server_endpoints import (
    ADAPTERS,
    ClearedWeights,
    ServerInfo,
)

PATH = "/inference/v1/generate"
EXTENSION = "megatron_gspo_worker.WeightReceiver"  # as the servers import it
_KEEPS_MEMORY = (
    "it can't free its memory for the trainer; start it on a GPU with --enable-sleep-mode"
)
_CHECKER = "/weight_checker"
_FLUSH_POLL_SECONDS = 0.05  # between two flushes of a server whose requests are still ending


class VLLMAPI(ServerAPI):
    """See `ServerAPI`.

    vLLM 0.32 and 0.33 in its developer mode, which has the endpoints of weights and versions.
    """

    engine = "vllm"
    responses: ResponseParser = response_parser

    def gives_log_probs(self, sampling: SamplingParams) -> bool:
        """See `ServerAPI.gives_log_probs`: processed log-probs are over the tokens that top-p,
        top-k and min-p leave.
        """
        return sampling.greedy or not sampling.truncates or sampling.max_support > 0

    def generate_request(
        self, tokens: list[int], context: RequestContext, sampling: SamplingParams, seed: int
    ) -> Request:
        """See `ServerAPI.generate_request`."""
        params = {
            "max_tokens": context.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
            **OTHER_SAMPLING,
            "stop_token_ids": list(context.model.stop_ids),
            "ignore_eos": True,  # the same end tokens on every engine: those above
            "seed": seed,
            "logprobs": _requested_log_probs(context),
            "routed_experts_prompt_start": context.routes_start,
        }
        return _request(
            tokens, params, response_parser.max_response_bytes(context), context.model.adapters
        )

    def prefill_request(self, tokens: list[int], context: RequestContext) -> Request:
        """See `ServerAPI.prefill_request`. vLLM generates at least one token."""
        params = {"max_tokens": 1, "temperature": 0.0}
        max_bytes = response_parser.max_response_bytes(context)
        return _request(tokens, params, max_bytes, context.model.adapters)

    def score_request(self, tokens: list[int], context: RequestContext) -> Request:
        """See `ServerAPI.score_request`."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": context.top_count}
        max_bytes = response_parser.max_response_bytes(context) + score_bytes(tokens, context)
        return _request(tokens, params, max_bytes, context.model.adapters)

    async def weight_version(self, server: ServerClient, *, timeout: float) -> str | None:
        """See `WeightEndpoints.weight_version`."""
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

    async def restore_memory(self, server: ServerClient, tag: str, *, timeout: float) -> None:
        """See `ServerAPI.restore_memory`."""
        await server.post(f"/wake_up?tags={tag}", {}, timeout=timeout)

    async def server_info(self, server: ServerClient, *, timeout: float) -> ServerInfo:
        """See `WeightEndpoints.server_info`. Four requests; the first one takes seconds, in which
        vLLM collects its environment."""
        answer = await get_object(
            server,
            "/server_info?config_format=json",
            timeout=timeout,
            expected="a vLLM server with VLLM_SERVER_DEV_MODE=1",
        )
        config = _section(answer, "vllm_config")
        version = await get_object(server, "/version", timeout=timeout, expected="a vLLM server")
        model = _section(config, "model_config")
        parallel = _section(config, "parallel_config")
        cache = _section(config, "cache_config")
        device = str(_section(config, "device_config").get("device", "unknown"))
        outputs = _section(config, "aux_output_config")
        longest = positive(model.get("max_model_len"))  # of prompt and response
        blocks = positive(cache.get("num_gpu_blocks"))
        block_size = positive(cache.get("block_size"))
        limits = [] if longest is None else [longest]
        if blocks is not None and block_size is not None:
            limits.append(blocks * block_size)
        receiver = parallel.get("worker_extension_cls") == EXTENSION
        return ServerInfo(
            url=server.url,
            version=str(version.get("version", "unknown")),
            start_id=str(config.get("instance_id")),
            weight_version=await self.weight_version(server, timeout=timeout) or "",
            model_path=str(model.get("model", "")),
            device=device.partition(":")[0],
            tp_size=count(parallel, "tensor_parallel_size", server),
            pp_size=count(parallel, "pipeline_parallel_size", server),
            dp_size=count(parallel, "data_parallel_size", server),
            max_input_tokens=longest,
            max_total_tokens=min(limits, default=None),
            routed_experts=bool(outputs.get("enable_return_routed_experts", False)),
            update_session=False,
            speculative=config.get("speculative_config") is not None,
            receiver=receiver,
            adapters=config.get("lora_config") is not None,
            keeps_memory="" if model.get("enable_sleep_mode") else _KEEPS_MEMORY,
            refusal=_refusal(model, await has_endpoint(server, PATH, timeout=timeout), receiver),
        )

    async def pause(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.pause`."""
        await server.post("/pause?mode=abort", {}, timeout=timeout)

    async def resume(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.resume`."""
        await server.post("/resume", {}, timeout=timeout)

    async def set_version(self, server: ServerClient, version: str, *, timeout: float) -> None:
        """See `WeightEndpoints.set_version`."""
        await server.post("/update_weight_version", {"new_version": version}, timeout=timeout)

    async def flush_cache(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.flush_cache`.

        vLLM answers `"success": false` while requests are still ending.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            answer = await server.post("/reset_prefix_cache", {}, timeout=timeout)
            if isinstance(answer, dict) and answer.get("success") is True:
                return
            if asyncio.get_running_loop().time() > deadline:
                reason = f"the prefix cache was not emptied within {timeout:g} s"
                raise ServerError(
                    f"server {server.url}/reset_prefix_cache: {reason}", status=200, retry=True
                )
            await asyncio.sleep(_FLUSH_POLL_SECONDS)

    async def clear_weights(self, server: ServerClient, *, timeout: float) -> ClearedWeights:
        """See `WeightEndpoints.clear_weights`. A digest that stays is of a parameter that was zero,
        or without bytes: vLLM keeps those that it packs for a CPU kernel elsewhere."""
        before = await _digests(server, timeout)
        await server.post(_CHECKER, {"action": "reset"}, timeout=timeout)
        after = await _digests(server, timeout)
        changed = {name: digest for name, digest in after.items() if digest != before.get(name)}
        return ClearedWeights(changed, len(after))

    async def unwritten(
        self, server: ServerClient, cleared: ClearedWeights, *, timeout: float
    ) -> list[str]:
        """See `WeightEndpoints.unwritten`."""
        digests = await _digests(server, timeout)
        return sorted(
            name for name, digest in cleared.digests.items() if digests.get(name) == digest
        )

    async def load_checkpoint(self, server: ServerClient, path: Path, *, timeout: float) -> None:
        """See `WeightEndpoints.load_checkpoint`."""
        await _call(server, "receive_checkpoint", timeout, args=[str(path)])

    async def load_adapters(self, server: ServerClient, path: Path, *, timeout: float) -> None:
        """See `WeightEndpoints.load_adapters`."""
        body = {"lora_name": ADAPTERS, "lora_path": str(path), "load_inplace": True}
        await server.post("/v1/load_lora_adapter", body, timeout=timeout)

    async def receive(
        self, server: ServerClient, requests: Sequence[JsonObject], *, timeout: float
    ) -> None:
        """See `WeightEndpoints.receive`."""
        await _call(server, "receive_weights", timeout, args=[json.dumps(list(requests))])


def _requested_log_probs(context: RequestContext) -> int | None:
    """Log-probs per token beside the sampled one's; None without any. One more than is wanted: the
    sampled token takes the place of the last one if it is not among them; and it shows that more
    ids than those of a support could be drawn."""
    if not context.log_probs:
        return None
    wanted = context.max_support or context.top_count
    return wanted + 1 if wanted else 0


def _request(tokens: list[int], params: JsonObject, max_bytes: int, adapters: str = "") -> Request:
    body: JsonObject = {"token_ids": tokens, "sampling_params": {**params, "detokenize": False}}
    if adapters:
        body["model"] = adapters
    return Request(PATH, body, max_bytes)


async def _digests(server: ServerClient, timeout: float) -> dict[str, str]:
    """SHA-256 of each parameter of each worker, by name. Raises `ServerError`."""
    answer = await server.post(_CHECKER, {"action": "checksum"}, timeout=timeout)
    digests = answer.get("checksums") if isinstance(answer, dict) else None
    if not isinstance(digests, dict) or not digests:
        raise ServerError(
            f"server {server.url}{_CHECKER}: no checksums came back", status=200, retry=False
        )
    return digests


async def _call(server: ServerClient, method: str, timeout: float, **arguments: object) -> None:
    """Call a method of every worker of the server."""
    await server.post(
        "/collective_rpc", {"method": method, "timeout": timeout, **arguments}, timeout=timeout
    )


def _section(config: JsonObject, name: str) -> JsonObject:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _refusal(model: JsonObject, generates: bool, receiver: bool) -> str:
    """Why the server's responses can't be used, with the fix; "" if they can."""
    if (mode := model.get("logprobs_mode")) != "processed_logprobs":
        return (
            f"its log-probs are {str(mode)[:40]}, before temperature; start it with "
            "--logprobs-mode processed_logprobs"
        )
    if not generates:
        return (
            f"it has no {PATH}, which gives tokens with their weight version; start it with"
            " --enable-scale-out"
        )
    if not receiver:
        return (
            "without our worker extension its weights may be wrong after an update; start it with "
            f"megatron-gspo serve --engine vllm, or --worker-extension-cls {EXTENSION}"
        )
    return ""
