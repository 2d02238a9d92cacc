"""Plays an agent once where its file is imported, so that each run begins with what its package
prepares at the first call. A run of the OpenAI Agents SDK takes a third of the time then."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from megatron_gspo.agents.agent_function import AgentTask, play_task

TEXT = "-"
CHAT = {
    "id": "reply",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT},
            "finish_reason": "stop",
        }
    ],
}
RESPONSE = {
    "id": "reply",
    "object": "response",
    "created_at": 0,
    "model": "policy",
    "status": "completed",
    "output": [
        {
            "id": "message",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


class Replies(BaseHTTPRequestHandler):
    """Answers every request with the same reply."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(CHAT if self.path.endswith("/chat/completions") else RESPONSE).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""


def rehearse(agent: Callable[[AgentTask], Any], **metadata: str) -> None:
    """Call an agent with a task that has no right answer."""
    with HTTPServer(("127.0.0.1", 0), Replies) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        task = AgentTask("-", f"{address}/v1", address, "-", ".", 0, 0, 0, metadata=metadata)
        with contextlib.suppress(Exception):  # the task can't be solved
            play_task(agent, task)
        server.shutdown()
        thread.join()
