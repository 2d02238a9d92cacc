"""Servers that take weights as SGLang's do: its endpoints, its process groups, one request at a
time, without a model.

They keep a checksum of each tensor. Forked from one process, so that a machine can hold many of
them.

    python -m tests.support.weight_server 8

prints a JSON list of [url, process id], then serves until its input ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from megatron_gspo.weight_transport.receiver import megatron_gspo_receiver
from megatron_gspo.weight_transport.server_endpoints import RECEIVER

ROOT = Path(__file__).resolve().parents[2]


def checksum(tensor: torch.Tensor) -> int:
    """Of the tensor's bytes."""
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


class Scheduler:
    """What SGLang's scheduler does with a request; one after the other, in a thread.

    held: checksum of each tensor. buckets: broadcasts received.
    """

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.held: dict[str, int] = {}
        self.buckets = 0
        self.version = "default"
        self.in_session = False

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        """As `init_custom_process_group`."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = body["group_name"]
        limit = timedelta(minutes=30)
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(
            rendezvous(address, body["rank_offset"], body["world_size"], timeout=limit)
        )
        store.set_timeout(limit)
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(body["backend"]),
            PrefixStore(name, store),
            group_name=name,
            timeout=limit,
        )
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[name] = group

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        """A bucket in the format "flattened_bucket"."""
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [
            dtype.itemsize * torch.Size(shape).numel()
            for dtype, shape in zip(dtypes, body["shapes"], strict=True)
        ]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.groups[body["group_name"]])
        self.load_weights(list(zip(body["names"], data.split(sizes), strict=True)))

    def update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        """A request to our custom weight loader, or a bucket in the format "flattened_bucket"."""
        payload = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        if body["load_format"] == RECEIVER:
            megatron_gspo_receiver.load(self, payload)
            return
        flat = payload["flattened_tensor"]
        self.load_weights(
            [(each.name, flat[each.start_idx : each.end_idx]) for each in payload["metadata"]]
        )

    def load_weights(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """As a model's."""
        self.buckets += 1
        for name, tensor in named_tensors:
            if name == "refused":
                raise ValueError("a tensor of the wrong shape")
            self.held[name] = checksum(tensor)

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        """Leave a group."""
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def begin_weight_update(self, body: dict[str, Any]) -> None:
        """Open a session."""
        if self.in_session:
            raise ValueError("a session is open")
        self.in_session = True

    def end_weight_update(self, body: dict[str, Any]) -> None:
        """Close it."""
        if not self.in_session:
            raise ValueError("no session is open")
        self.in_session = False

    def update_weight_version(self, body: dict[str, Any]) -> None:
        """Set the version."""
        self.version = body["new_version"]


def application() -> web.Application:
    """All endpoints; those of the scheduler answer 400 with the error's text."""
    scheduler = Scheduler()
    thread = ThreadPoolExecutor(1)
    info = {
        "version": "0.5.23",
        "random_seed": os.getpid(),
        "startup_time": time.time(),
        "device": "cpu",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
    }

    async def do(request: web.Request) -> web.Response:
        step = getattr(scheduler, request.path.strip("/"), None)
        try:
            if step is not None:
                await asyncio.get_running_loop().run_in_executor(thread, step, await request.json())
        except Exception as error:
            return web.json_response({"success": False, "message": str(error)[:200]}, status=400)
        return web.json_response({"success": True})

    async def tell(request: web.Request) -> web.Response:
        known = {
            "/server_info": info,
            "/model_info": {"weight_version": scheduler.version, "model_path": "m"},
            "/held": {"held": scheduler.held, "buckets": scheduler.buckets},
        }
        return web.json_response(known[request.path])

    app = web.Application()
    for path in ("/server_info", "/model_info", "/held"):
        app.router.add_get(path, tell)
    steps = [name for name in vars(Scheduler) if name[0] != "_" and name != "load_weights"]
    for name in ("pause_generation", "continue_generation", "flush_cache", *steps):
        app.router.add_post(f"/{name}", do)
    return app


def serve(report: int) -> None:
    """Serve in this process without end; writes the URL to a pipe."""

    async def run() -> None:
        runner = web.AppRunner(application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with os.fdopen(report, "w") as pipe:
            pipe.write(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    torch.set_num_threads(1)
    asyncio.run(run())


def fork_server() -> tuple[str, int]:
    """(URL, process id) of a server."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.close(reader)
        serve(writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return pipe.read(), pid


@contextmanager
def weight_servers(count: int) -> Any:
    """(URL, process id) of so many servers; ended at the end of the block."""
    command = [sys.executable, "-m", "tests.support.weight_server", str(count)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield [(url, pid) for url, pid in json.loads(process.stdout.readline())]
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Fork the servers, print their addresses, end them when the input ends."""
    servers = [fork_server() for _ in range(int(sys.argv[1]))]
    print(json.dumps(servers), flush=True)
    sys.stdin.read()
    for _, pid in servers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
