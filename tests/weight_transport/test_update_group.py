"""The process group with a server's ranks.

The other side here joins as SGLang's `init_custom_process_group` does.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from megatron_gspo.weight_transport.update_group import (
    GroupError,
    UpdateGroup,
    local_address,
)

# Ranks 1 .. n - 1, each with a default group of its own; prints what each broadcast brings.
OTHER_SIDE = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous
port, name, rank, size, count, nbytes = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, size, timeout=timedelta(seconds=60)))
store.set_timeout(timedelta(seconds=60))
group, _ = _new_process_group_helper(size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=name,
                                     timeout=timedelta(seconds=60))
_world.pg_group_ranks[group] = {i: i for i in range(size)}
for _ in range(count):
    data = torch.empty(nbytes, dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    print(data.sum().item(), flush=True)
os._exit(0)
"""


def others(group: UpdateGroup, *, count: int, nbytes: int) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                OTHER_SIDE,
                str(group.port),
                group.name,
                str(rank),
                str(group.size),
                str(count),
                str(nbytes),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, group.size)
    ]


def within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


def test_the_others_leave_a_broken_group_while_its_error_is_kept() -> None:
    """Their connections close when it is dropped, so that those who wait for the next broadcast
    get an error.
    """
    group = UpdateGroup("weights-kept", 3, address="127.0.0.1", backend="gloo", timeout=60)
    waiting, dying = processes = others(group, count=9, nbytes=1000)

    async def run() -> GroupError:
        await group.join()
        await group.broadcast(torch.zeros(1000, dtype=torch.uint8))
        assert dying.stdout.readline() == "0\n"
        dying.kill()
        with pytest.raises(GroupError) as caught:
            for _ in range(5):
                await group.broadcast(torch.zeros(1000, dtype=torch.uint8))
        return caught.value

    try:
        kept = within(60.0, run())
        assert waiting.poll() is None
        group.drop()
        assert waiting.wait(20.0) == 1 and "the broadcast broke" in str(kept)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_nobody_joins() -> None:
    """Dropped, it no longer waits, and its store is closed: joining it fails at once."""
    group = UpdateGroup("weights-alone", 2, address="127.0.0.1", backend="gloo", timeout=60)

    async def run() -> None:
        joining = asyncio.create_task(group.join())
        await asyncio.sleep(0.5)
        group.drop()
        with pytest.raises(GroupError, match="^no process group with it"):
            await joining

    began = time.monotonic()
    within(20.0, run())
    assert time.monotonic() - began < 10.0
    with pytest.raises(OSError), socket.socket() as late:
        late.connect(("127.0.0.1", group.port))


def test_the_address_on_the_route_to_a_server() -> None:
    assert local_address("http://127.0.0.1:30000") == "127.0.0.1"
    with pytest.raises(GroupError, match="^no route to it"):
        local_address("http://no-such-host.invalid:1")


def test_it_listens_on_the_given_address_alone() -> None:
    group = UpdateGroup("weights-loopback", 2, address="127.0.0.1", backend="gloo", timeout=60)
    wanted = f"0100007F:{group.port:04X}"  # 127.0.0.1, as the kernel writes it
    with open("/proc/net/tcp") as table:
        listening = [fields[1] for line in table if (fields := line.split())[3] == "0A"]
    assert wanted in listening
    assert not [
        address
        for address in listening
        if address.endswith(f":{group.port:04X}") and address != wanted
    ]
    group.drop()
