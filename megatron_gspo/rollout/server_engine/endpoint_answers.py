"""What the servers' own endpoints answer, read carefully."""

from __future__ import annotations

from megatron_gspo.errors import first_line
from megatron_gspo.servers.http_client import JsonObject, ServerClient, ServerError


async def has_endpoint(server: ServerClient, path: str, *, timeout: float) -> bool:
    """Whether the server has a POST endpoint: a GET of it is then answered "method not allowed"
    and has no effect.
    """
    try:
        await server.get(path, timeout=timeout)
    except ServerError as error:
        if error.status == 405:
            return True
        if error.status == 404:
            return False
        raise
    return True


async def get_object(
    server: ServerClient, path: str, *, timeout: float, expected: str
) -> JsonObject:
    """The JSON object at a path. expected: the server that has it, for the message.

    Raises `ServerError`.
    """
    answer = await server.get(path, timeout=timeout)
    if not isinstance(answer, dict):
        raise ServerError(
            f"server {server.url}{path}: answered {first_line(type(answer).__name__)}, not an"
            f" object; is this {expected}?",
            retry=False,
        )
    return answer


def count(info: JsonObject, key: str, server: ServerClient) -> int:
    """A positive number, 1 where it is absent. Raises `ServerError`."""
    value = info.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ServerError(
            f"server {server.url}/server_info: {key} is {str(value)[:40]}, not a count", retry=False
        )
    return value


def positive(value: object) -> int | None:
    """The value if it is a positive integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
