"""A server whose answers to requests of a weight update are written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from megatron_gspo.servers.http_client import ServerClient
from tests.servers.web_server import run_command


class Server:
    """Answers by path, in turn: an object, or a status; `default` elsewhere. requests: (path
    with query, body).
    """

    default: Any = {"success": True}

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "/" + path: given if isinstance(given, list) else [given]
            for path, given in answers.items()
        }
        self.requests: list[tuple[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(
            (request.path_qs, await request.json() if request.method == "POST" else None)
        )
        given = self.answers.get(request.path, [self.default])
        answer = given.pop(0) if len(given) > 1 else given[0]
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    def run(self, command: Callable[[ServerClient], Any]) -> Any:
        return run_command(command, self.handle)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]
