"""SGLang's endpoints (`ServerAPI`)."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
from megatron_gspo.rollout.sglang import response_parser
from megatron_gspo.servers.http_client import JsonObject, ServerClient, ServerError
from megatron_gspo.servers.server_launch import release
from megatron_gspo.weight_transport.base64_json import json_with_base64
from megatron_gspo.weight_transport.server_endpoints import ADAPTERS, RECEIVER, ServerInfo

if TYPE_CHECKING:  # the process that hosts agents calls servers, and has no torch
    from megatron_gspo.weight_transport.buckets import Entry
    from megatron_gspo.weight_transport.update_group import UpdateGroup

FORMAT = "flattened_bucket"  # of weights; see `sglang_payload`
_PATH = "/generate"
_ADAPTER_TENSORS = (0, 5, 17)  # before, adapters in a request have another form
_FLUSH_POLL_SECONDS = 0.05  # between two flushes of a server whose requests are still ending


class SGLangAPI(ServerAPI):
    """See `ServerAPI`. SGLang 0.5.15 to 0.5.23."""

    engine = "sglang"
    init_group_path = "/init_weights_update_group"
    broadcast_path = "/update_weights_from_distributed"
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
            "min_p": sampling.min_p,
            **OTHER_SAMPLING,
            "stop_token_ids": list(context.model.stop_ids),
            "sampling_seed": seed,
        }
        body = _body(tokens, params, context) | {"return_logprob": True}
        if context.top_count:
            body["top_logprobs_num"] = context.top_count
        if context.max_support:
            body["return_sampling_mask"] = True
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
        if context.top_count:
            body["top_logprobs_num"] = context.top_count
        max_bytes = response_parser.max_response_bytes(context) + score_bytes(tokens, context)
        return Request(_PATH, body, max_bytes)

    async def weight_version(self, server: ServerClient, *, timeout: float) -> str | None:
        """See `WeightEndpoints.weight_version`."""
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

    async def restore_memory(self, server: ServerClient, tag: str, *, timeout: float) -> None:
        """See `ServerAPI.restore_memory`."""
        await server.post("/resume_memory_occupation", {"tags": [tag]}, timeout=timeout)

    async def server_info(self, server: ServerClient, *, timeout: float) -> ServerInfo:
        """See `WeightEndpoints.server_info`. Three requests.

        /server_info returns every argument of the server, its API key included; only the fields of
        `ServerInfo` are kept.
        """
        expected = "an SGLang server"
        info = await get_object(server, "/server_info", timeout=timeout, expected=expected)
        model = await get_object(server, "/model_info", timeout=timeout, expected=expected)
        return ServerInfo(
            url=server.url,
            version=str(info.get("version", "unknown")),
            start_id=f"{info.get('random_seed')} {info.get('startup_time')}",
            weight_version=str(model.get("weight_version", "")),
            model_path=str(model.get("model_path", "")),
            device=str(info.get("device", "unknown")),
            tp_size=count(info, "tp_size", server),
            pp_size=count(info, "pp_size", server),
            dp_size=count(info, "dp_size", server),
            max_input_tokens=positive(info.get("max_req_input_len")),
            max_total_tokens=positive(info.get("max_total_num_tokens"))
            or positive(info.get("max_total_tokens")),
            routed_experts=bool(info.get("enable_return_routed_experts", False)),
            speculative=bool(info.get("speculative_algorithm")),
            adapters=bool(info.get("enable_lora")),
            adapter_tensors=release(str(info.get("version", ""))) >= _ADAPTER_TENSORS,
            update_session=await has_endpoint(server, "/begin_weight_update", timeout=timeout),
        )

    async def pause(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.pause`."""
        await server.post("/pause_generation", {"mode": "abort"}, timeout=timeout)

    async def resume(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.resume`."""
        await server.post("/continue_generation", {}, timeout=timeout)

    async def set_version(self, server: ServerClient, version: str, *, timeout: float) -> None:
        """See `WeightEndpoints.set_version`."""
        body = {"new_version": version, "abort_all_requests": False}
        await _post_checked(server, "/update_weight_version", body, timeout)

    async def flush_cache(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.flush_cache`. SGLang answers 400 while requests are still ending."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                await server.post("/flush_cache", {}, timeout=timeout)
                return
            except ServerError as error:
                if error.status != 400 or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(_FLUSH_POLL_SECONDS)

    async def begin_update(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.begin_update`."""
        try:
            await _post_checked(server, "/begin_weight_update", {}, timeout)
        except ServerError as error:
            if error.status != 400:
                raise
            await self.end_update(server, timeout=timeout)
            await _post_checked(server, "/begin_weight_update", {}, timeout)

    async def end_update(self, server: ServerClient, *, timeout: float) -> None:
        """See `WeightEndpoints.end_update`."""
        await _post_checked(server, "/end_weight_update", {}, timeout)

    async def load_checkpoint(self, server: ServerClient, path: Path, *, timeout: float) -> None:
        """See `WeightEndpoints.load_checkpoint`.

        The format is given: a server started with `--load-format dummy` would load random weights
        again.
        """
        body: JsonObject = {
            "model_path": str(path),
            "load_format": "auto",
            "flush_cache": False,
        }
        await _post_checked(server, "/update_weights_from_disk", body, timeout)

    async def load_adapters(self, server: ServerClient, path: Path, *, timeout: float) -> None:
        """See `WeightEndpoints.load_adapters`."""
        await _unload_adapters(server, timeout)
        body: JsonObject = {"lora_name": ADAPTERS, "lora_path": str(path)}
        await _post_checked(server, "/load_lora_adapter", body, timeout)

    async def load_adapter_payloads(
        self,
        server: ServerClient,
        config: Mapping[str, object],
        payloads: Sequence[Iterable[bytes | memoryview]],
        *,
        timeout: float,
    ) -> None:
        """See `WeightEndpoints.load_adapter_payloads`."""
        await _unload_adapters(server, timeout)
        fields = {"lora_name": ADAPTERS, "config_dict": config, "load_format": FORMAT}
        await _post_checked(
            server, "/load_lora_adapter_from_tensors", _tensor_body(fields, payloads), timeout
        )

    async def load_payloads(
        self,
        server: ServerClient,
        payloads: Sequence[Iterable[bytes | memoryview]],
        *,
        timeout: float,
    ) -> None:
        """See `WeightEndpoints.load_payloads`.

        The cache is flushed at the end: with ending requests, 0.5.15 fails.
        """
        await _post_checked(
            server, "/update_weights_from_tensor", _weights_body(payloads, FORMAT), timeout
        )

    async def receive(
        self, server: ServerClient, requests: Sequence[JsonObject], *, timeout: float
    ) -> None:
        """See `WeightEndpoints.receive`."""
        import torch

        texts = [
            torch.tensor(list(json.dumps(request).encode()), dtype=torch.uint8)
            for request in requests
        ]
        payloads = [[pickle.dumps([("request", text)])] for text in texts]
        await _post_checked(
            server, "/update_weights_from_tensor", _weights_body(payloads, RECEIVER), timeout
        )

    async def init_group(
        self, server: ServerClient, group: UpdateGroup, first_rank: int, *, timeout: float
    ) -> None:
        """See `WeightEndpoints.init_group`."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": first_rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await _post_checked(server, self.init_group_path, body, timeout)

    async def load_broadcast(
        self, server: ServerClient, group_name: str, entries: Sequence[Entry], *, timeout: float
    ) -> None:
        """See `WeightEndpoints.load_broadcast`."""
        body: JsonObject = {
            "names": [entry.name for entry in entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "group_name": group_name,
            "load_format": FORMAT,
            "flush_cache": False,
        }
        await _post_checked(server, self.broadcast_path, body, timeout)

    async def destroy_group(self, server: ServerClient, group_name: str, *, timeout: float) -> None:
        """See `WeightEndpoints.destroy_group`."""
        await server.post(
            "/destroy_weights_update_group", {"group_name": group_name}, timeout=timeout
        )


def _body(tokens: list[int], params: JsonObject, context: RequestContext) -> JsonObject:
    body: JsonObject = {"input_ids": tokens, "sampling_params": params}
    if context.model.adapters:
        body["lora_path"] = context.model.adapters
    return body


async def _unload_adapters(server: ServerClient, timeout: float) -> None:
    """SGLang answers 400 to unloading what it has not loaded."""
    try:
        await server.post("/unload_lora_adapter", {"lora_name": ADAPTERS}, timeout=timeout)
    except ServerError as error:
        if error.status != 400:
            raise


def _weights_body(
    payloads: Sequence[Iterable[bytes | memoryview]], load_format: str
) -> AsyncIterator[bytes]:
    return _tensor_body({"load_format": load_format, "flush_cache": False}, payloads)


async def _tensor_body(
    fields: JsonObject, payloads: Sequence[Iterable[bytes | memoryview]]
) -> AsyncIterator[bytes]:
    for piece in json_with_base64(fields, "serialized_named_tensors", payloads):
        yield piece


async def _post_checked(
    server: ServerClient,
    path: str,
    body: Mapping[str, object] | AsyncIterable[bytes],
    timeout: float,
) -> None:
    """POST. Raises `ServerError` unless the response has `"success": true`."""
    answer = await server.post(path, body, timeout=timeout)
    if not isinstance(answer, dict) or answer.get("success") is not True:
        content = answer if isinstance(answer, dict) else {}
        message = content.get("message") or content.get("error_message") or answer
        words = " ".join(server.redact(str(message).encode()).decode().split())[:200]
        raise ServerError(
            f"server {server.url}{path}: did not succeed: {words}", status=200, retry=False
        )
