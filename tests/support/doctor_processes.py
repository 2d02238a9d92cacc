"""The doctor's command line in real processes, one per rank, as torchrun would start them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_gspo.tools.doctor.__main__ import check
from megatron_gspo.tools.doctor.arguments import Options
from megatron_gspo.tools.doctor.diagnostics import LEVELS, quiet_output
from megatron_gspo.tools.doctor.rank_checks import local_rank_info
from megatron_gspo.tools.doctor.rendezvous import LaunchEnvironment, Rendezvous, open_store
from megatron_gspo.tools.doctor.runner import CheckRunner
from megatron_gspo.tools.doctor.version_checks import installed
from tests.support.distributed import end_process, fork_server
from tests.support.network_hosts import CONFIGURATION, Host
from tests.support.ports import free_port

LIMIT = 120.0  # seconds, far below the doctor's own of ten minutes
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000  # linux/sched.h


@dataclass(frozen=True)
class Outcome:
    """Of one rank: exit code (negative: a signal), output, errors."""

    code: int
    out: str
    err: str


def doctor(folder: Path, *arguments: str, world: int = 1, port: int = 0,
           others: dict[int, Callable[[], None]] | None = None, absent: Sequence[int] = (),
           own_arguments: dict[int, Sequence[str]] | None = None, hosts: Sequence[Host] = ()) -> list[Outcome]:
    """Run it on each of ``world`` ranks but the absent ones. others: what some ranks do in its place; own_arguments: of
    those that get others; hosts: where each rank runs, instead of here."""
    port = port or free_port()
    context = fork_server()
    processes = {
        rank: context.Process(target=_child, args=(
            rank, world, port, (own_arguments or {}).get(rank, arguments), (others or {}).get(rank), folder,
            tuple(hosts)))
        for rank in range(world) if rank not in absent
    }  # fmt: skip
    try:
        for process in processes.values():
            process.start()
        for rank, process in processes.items():
            if (others or {}).get(rank) in (arrive_and_hang, ready_and_hang):  # the ranks before it have ended
                end_process(process)
            process.join(LIMIT)
            assert process.exitcode is not None, f"rank {rank} still runs after {LIMIT:g} s"
        codes = {rank: process.exitcode for rank, process in processes.items()}
    finally:
        for process in processes.values():
            end_process(process)
    return [Outcome(codes[rank], *((folder / f"{name}_{rank}").read_text() for name in ("out", "err")))
            for rank in processes]  # fmt: skip


def enter(host: Host) -> None:
    """Let this process run on a host, as `ip netns exec` does for a new program: its network, its name, its names."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(CLONE_NEWNS | CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    with open(f"/run/netns/{host.name}") as network:
        if system.setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    socket.sethostname(host.name)
    for command in (["--make-rslave", "/"], ["--bind", str(CONFIGURATION / host.name / "hosts"), "/etc/hosts"]):
        subprocess.run(["mount", *command], check=True)


def arrive_and_leave() -> None:
    """A rank that arrives and dies."""
    join()
    os._exit(3)


def arrive_and_hang() -> None:
    """A rank that arrives and does nothing more."""
    join()
    time.sleep(2 * LIMIT)


def ready_and_hang() -> None:
    """A rank that is ready for the groups, and takes no part in them."""
    rendezvous = join()
    state = {"worst": "ok", "config": hashlib.sha256(b"").hexdigest(), "ranks": False, "run_dir": None}
    assert rendezvous.all_gather("groups", state, 10.0) is not None
    time.sleep(2 * LIMIT)


def impatient() -> None:
    """A doctor that waits a second where it usually waits a minute or ten."""
    runner = CheckRunner(Options(seconds=1.0, local_seconds=6.0, grace=0.5), sys.stdout)
    with quiet_output():
        raise SystemExit(runner.run())


def join() -> Rendezvous:
    launch = LaunchEnvironment.read(os.environ)
    rendezvous = Rendezvous(launch, open_store(launch, 10.0))
    rendezvous.gather_rank_info(local_rank_info(launch.rank, launch.local_rank, installed()), 10.0)
    rendezvous.clocks(10.0)
    return rendezvous


def _child(rank: int, world: int, port: int, arguments: Sequence[str], instead: Callable[[], None] | None,
           folder: Path, hosts: Sequence[Host]) -> Any:
    os.setsid()
    if hosts:
        enter(hosts[rank])
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(folder / f"{name}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    if hosts:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world > 1:
        local, size = (0, 1) if hosts else (rank, world)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(size),
                          MASTER_ADDR=hosts[0].address if hosts else "127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    try:
        if instead is not None:
            instead()
        code = check(list(arguments))
    except SystemExit as left:
        code = left.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)

TP2 = "parallel.tensor_model_parallel_size=2"


def table(outcome: Outcome) -> list[tuple[str, str, str]]:
    """(level, check, text) of every line but the summary; no traceback, no second report."""
    assert "Traceback" not in outcome.out + outcome.err, outcome.err
    *rows, summary = outcome.out.splitlines()
    assert ": " in summary and not summary.startswith(LEVELS)
    return [tuple(row.split(None, 2)) for row in rows]  # type: ignore[misc]


def faults(outcome: Outcome) -> list[tuple[str, str]]:
    return [(level, check) for level, check, _ in table(outcome) if level in ("warning", "error")]
