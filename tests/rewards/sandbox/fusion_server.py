"""A server that speaks Sandbox Fusion's `POST /run_code`, without a sandbox: for programs of
these tests alone.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAILED = {
    "status": "SandboxError",
    "message": "no space left",
    "compile_result": None,
    "run_result": None,
    "files": {},
}


class FusionServer(ThreadingHTTPServer):
    """faults: what the next requests get in place of an answer: an HTTP status, JSON, bytes, a URL
    to go to, or "close".

    requests: the JSON of all requests so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: list[object] = []
        self.requests: list[dict] = []

    def handle_error(self, *_: object) -> None:
        """A client that has gone is part of the tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FusionServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if self.path != "/run_code":
            self._answer(404, b"{}")
        elif not self.server.faults:
            self._answer(200, json.dumps(run_code(request)).encode())
        else:
            fault = self.server.faults.pop(0)
            if isinstance(fault, int):
                self._answer(fault, b"{}")
            elif isinstance(fault, str) and fault.startswith("http"):
                self._answer(302, b"{}", location=fault)
            elif fault != "close":
                self._answer(200, fault if isinstance(fault, bytes) else json.dumps(fault).encode())

    def do_GET(self) -> None:
        """Of a client that follows a redirect."""
        self.server.requests.append({})
        request = {"language": "python", "code": "print(5)", "stdin": "", "run_timeout": 9}
        self._answer(200, json.dumps(run_code(request)).encode())

    def _answer(self, status: int, content: bytes, location: str | None = None) -> None:
        self.send_response(status)
        if location is not None:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def run_code(request: dict) -> dict:
    """The answer of RunCodeResponse: Success, or Failed for an exit status other than 0 or a
    time-out.
    """
    compiled = None
    if request["language"] == "cpp" and "int main" not in request["code"]:
        compiled = {
            "status": "Finished",
            "execution_time": 0.1,
            "return_code": 1,
            "stdout": "",
            "stderr": "no main",
        }
        return {
            "status": "Failed",
            "message": "",
            "compile_result": compiled,
            "run_result": None,
            "files": {},
        }
    start = time.monotonic()
    command = [sys.executable, "-I", "-S", "-c", request["code"]]
    try:
        ran = subprocess.run(
            command,
            input=request["stdin"],
            capture_output=True,
            text=True,
            timeout=request["run_timeout"],
        )
        result = {
            "status": "Finished",
            "return_code": ran.returncode,
            "stdout": ran.stdout,
            "stderr": ran.stderr,
        }
    except subprocess.TimeoutExpired:
        result = {
            "status": "TimeLimitExceeded",
            "return_code": None,
            "stdout": None,
            "stderr": None,
        }
    result["execution_time"] = time.monotonic() - start
    status = "Success" if result["return_code"] == 0 else "Failed"
    return {
        "status": status,
        "message": "",
        "compile_result": compiled,
        "run_result": result,
        "files": {},
    }


@contextlib.contextmanager
def fusion_server() -> Iterator[FusionServer]:
    """A server that answers until the end of the context."""
    with FusionServer() as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        try:
            yield server
        finally:
            server.shutdown()
