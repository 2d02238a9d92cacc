"""What a server is and what it can do, asked of the server itself rather than read from its version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_gspo.errors import first_line
from megatron_gspo.servers.http_client import Server, ServerError


@dataclass(frozen=True)
class Capabilities:
    """Of one server, as it answered.

    version: of SGLang; for messages, nothing is decided by it. life: differs after a restart. weight_version: what it
    says its weights are. model_path: the directory it loaded last. device: "cuda" or "cpu". tp_size, pp_size, dp_size:
    its parallel ranks. max_input_tokens: longest prompt that it takes, None where it doesn't say; max_total_tokens:
    tokens that its KV cache holds, likewise. routed_experts: whether it was started to return them. update_session:
    whether weights are sent between /begin_weight_update and /end_weight_update (0.5.23 refuses them otherwise,
    0.5.15 knows neither).
    """

    url: str
    version: str
    life: str
    weight_version: str
    model_path: str
    device: str
    tp_size: int
    pp_size: int
    dp_size: int
    max_input_tokens: int | None
    max_total_tokens: int | None
    routed_experts: bool
    update_session: bool


async def capabilities(server: Server, *, timeout: float) -> Capabilities:
    """Ask `server`. timeout: seconds for each of three requests. Raises `ServerError`.

    Its answer to /server_info holds every argument it was started with, its API key among them: nothing of it is kept
    or shown but the fields of `Capabilities`.
    """
    info = await _object(server, "/server_info", timeout)
    model = await _object(server, "/model_info", timeout)
    return Capabilities(
        url=server.url,
        version=str(info.get("version", "unknown")),
        life=f"{info.get('random_seed')} {info.get('startup_time')}",
        weight_version=str(model.get("weight_version", "")),
        model_path=str(model.get("model_path", "")),
        device=str(info.get("device", "unknown")),
        tp_size=_count(info, "tp_size", server),
        pp_size=_count(info, "pp_size", server),
        dp_size=_count(info, "dp_size", server),
        max_input_tokens=_number(info.get("max_req_input_len")),
        max_total_tokens=_number(info.get("max_total_num_tokens")) or _number(info.get("max_total_tokens")),
        routed_experts=bool(info.get("enable_return_routed_experts", False)),
        update_session=await has_endpoint(server, "/begin_weight_update", timeout=timeout),
    )


async def has_endpoint(server: Server, path: str, *, timeout: float) -> bool:
    """Whether a POST to `path` is known: a GET of it answers "method not allowed" then, and changes nothing."""
    try:
        await server.get(path, timeout=timeout)
    except ServerError as error:
        if error.status == 405:
            return True
        if error.status == 404:
            return False
        raise
    return True


async def weight_version(server: Server, *, timeout: float) -> str:
    """What the server says its weights are. Raises `ServerError`."""
    return str((await _object(server, "/model_info", timeout)).get("weight_version", ""))


async def _object(server: Server, path: str, timeout: float) -> dict[str, Any]:
    answer = await server.get(path, timeout=timeout)
    if not isinstance(answer, dict):
        raise ServerError(f"server {server.url}{path}: answered {first_line(type(answer).__name__)}, not an object; "
                          "is this an SGLang server?", retry=False)  # fmt: skip
    return answer


def _count(info: dict[str, Any], key: str, server: Server) -> int:
    value = info.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ServerError(f"server {server.url}/server_info: {key} is {str(value)[:40]}, not a count", retry=False)
    return value


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
