"""A program in sglang's place, for tests of what surrounds a server's process; tests/sglang has
real ones.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_gspo.config import ServerConfig
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch

# Answers on its port, with a child, as sglang does. What it does instead stands in the file that
# it's given as model.
PROGRAM = """
import http.server, os, pathlib, subprocess, sys, time

plan = pathlib.Path(sys.argv[sys.argv.index("--model-path") + 1]) / "plan"
what = plan.read_text() if plan.exists() else ""
port = int(sys.argv[sys.argv.index("--port") + 1])
if what == "exit":
    sys.exit("could not begin: no reason given")
if what == "hang":
    time.sleep(600)
if what == "port":  # once
    plan.unlink()
    sys.exit(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if what == "ill" else 200)
        self.end_headers()
    def log_message(self, *arguments):
        pass

subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("--config", "--config" in sys.argv, flush=True)
if "--config" in sys.argv:  # as sglang does
    print("settings", pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text(), flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> SGLangLaunch:
    """One server of an interpreter that has the program as its sglang."""
    packages = tmp_path / "packages"
    (packages / "sglang").mkdir(parents=True)
    (packages / "sglang" / "__init__.py").touch()
    (packages / "sglang" / "launch_server.py").write_text(PROGRAM)
    (packages / "sglang-0.5.23.dist-info").mkdir()
    (packages / "sglang-0.5.23.dist-info" / "METADATA").write_text(
        "Name: sglang\nVersion: 0.5.23\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = ServerConfig(num_servers=1, python=str(python), server_args=("--device", "cpu"))
    return SGLangLaunch(config, str(model), log_dir=str(tmp_path / "logs"))


def with_config(launch: SGLangLaunch, **changes: object) -> SGLangLaunch:
    """The launch with other values in its config."""
    return replace(launch, config=replace(launch.config, **changes))


def plan(launch: SGLangLaunch, what: str) -> None:
    """Set what the program does from now on: "exit", "hang", "ill" (unhealthy) or "port"."""
    (Path(launch.model) / "plan").write_text(what)


def running(processes: list[psutil.Process]) -> list[int]:
    return [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
