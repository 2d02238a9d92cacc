"""Process runs of a training run: its ranks as real processes, ended by SIGKILL or by themselves,
without orphans.

Ranks are forked from a server that has imported everything, so that a life costs a second or two
and not ten; each has a process group of its own, by which it and all that it starts can be found
and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import reasoning_gym  # noqa: F401  the fork server imports this module, so that no life imports what is slow

import megatron_gspo.loop.training_loop  # noqa: F401  likewise
from tests.fault_injection.kill_points import Target, Tripwire
from tests.support.distributed import fork_server
from tests.support.ports import free_port

_LIMIT = 300.0  # seconds after which a life counts as hung
_AFTERLIFE = 10.0  # seconds that what a killed rank forked has to end by itself


@dataclass(frozen=True)
class RandomKill:
    """Kill one rank (a number) or all (None) so many seconds after the start."""

    after: float
    rank: int | None


@dataclass
class Life:
    """How a life ended. codes: exit codes by rank, -9 for SIGKILL. counts: events by rank
    (``tripwire``), if whole.
    """

    codes: list[int]
    seconds: float
    log: str
    counts: list[dict[str, int]] = field(default_factory=list)
    orphans: int = 0

    @property
    def finished(self) -> bool:
        return not any(self.codes)

    @property
    def was_killed(self) -> bool:
        return -signal.SIGKILL in self.codes


def warm_up() -> None:
    """Start the server, which imports everything, so that it isn't part of the first life's
    time.
    """
    process = fork_server().Process(target=int)
    process.start()
    process.join()


def live(
    config: Path,
    folder: Path,
    processes: int,
    kill: RandomKill | Target | None,
    *,
    grace: float,
    overrides: Sequence[str] = (),
) -> Life:
    """Start the run of ``config`` on ``processes`` ranks, kill it as configured and return when no
    process is left.

    grace: seconds that the other ranks of a killed one continue before they are killed too, as
    torchrun would. folder: for logs and process ids; created empty. overrides: further arguments of
    the command.
    """
    folder.mkdir(parents=True)
    target = kill if isinstance(kill, Target) else None
    environment = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    context = fork_server()
    ranks = [
        context.Process(
            target=_rank, args=([str(config), *overrides], str(folder), rank, environment, target)
        )
        for rank in range(processes)
    ]
    started = time.monotonic()
    try:
        for process in ranks:
            process.start()
        if isinstance(kill, RandomKill):
            wait(
                [process.sentinel for process in ranks],
                timeout=max(0.0, started + kill.after - time.monotonic()),
            )
            for rank, process in enumerate(ranks):
                if kill.rank in (rank, None) and process.is_alive():
                    _kill(process.pid)
        _await(ranks, started, grace)
    finally:
        seconds = time.monotonic() - started
        for process in ranks:
            if process.is_alive():
                _kill(process.pid)
        for process in ranks:
            process.join()
        orphans = sum(_sweep(partial(_in_group, process.pid)) for process in ranks)
    codes = [process.exitcode for process in ranks]
    files = [folder / f"counts_{rank}.json" for rank in range(processes)]
    counts = [json.loads(file.read_text()) for file in files if file.is_file()]
    return Life(codes, seconds, _logs(folder), counts, orphans)


def live_under_torchrun(
    config: Path, folder: Path, processes: int, kill: RandomKill, *, after: Callable[[], bool]
) -> Life:
    """One ``torchrun --max-restarts 1``: a rank is killed, torchrun ends the others and starts all
    of them again.

    The time to the kill counts from when ``after`` is first true.
    """
    folder.mkdir(parents=True)
    arguments = [
        "--standalone",
        "--max-restarts",
        "1",
        "--nproc-per-node",
        str(processes),
        "-m",
        "megatron_gspo.train",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, str(config)]
    started = time.monotonic()
    with (folder / "log_0").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while agent.poll() is None and not after() and time.monotonic() < started + _LIMIT:
                time.sleep(0.02)
            time.sleep(kill.after)
            victim = _worker(agent, kill.rank or 0)
            if victim is not None:
                _kill(victim)
            agent.wait(_LIMIT)
        finally:
            for process in _tree(agent.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            agent.wait()
    seconds = time.monotonic() - started
    return Life(
        [agent.returncode or 0], seconds, _logs(folder), orphans=_sweep(lambda: _running(config))
    )


def _worker(agent: subprocess.Popen[Any], rank: int) -> int | None:
    """The process of a rank under torchrun."""
    for process in _tree(agent.pid)[1:]:
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("RANK") == str(rank)
                and "megatron_gspo.train" in process.cmdline()
            ):
                return process.pid
    return None


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _rank(
    arguments: list[str], folder: str, rank: int, environment: dict[str, str], target: Target | None
) -> None:
    """One rank, in a process of its own: the command line's ``main`` under a tripwire."""
    os.setpgid(0, 0)
    log = os.open(Path(folder) / f"log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    (Path(folder) / f"pid_{rank}").write_text(str(os.getpid()))
    from megatron_gspo.config import load_config
    from megatron_gspo.train import main

    def victims() -> list[int]:
        pattern = "pid_*" if target is not None and target.kills_all else f"pid_{rank}"
        pids = [int(file.read_text()) for file in Path(folder).glob(pattern)]
        return [pid for pid in pids if pid != os.getpid()]

    own_target = target if target is not None and target.rank == rank else None
    wire = Tripwire(Path(load_config(arguments[0]).run_dir), own_target, victims)
    wire.install()
    try:
        main(arguments)
    finally:
        (Path(folder) / f"counts_{rank}.json").write_text(json.dumps(wire.counts()))


def _await(ranks: Sequence[Any], started: float, grace: float) -> None:
    """Wait for all ranks. Once one has failed the others have ``grace`` seconds."""
    end = started + _LIMIT
    running = list(ranks)
    while running and time.monotonic() < end:
        wait([process.sentinel for process in running], timeout=max(0.0, end - time.monotonic()))
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode not in (None, 0) for process in ranks):
            end = min(end, time.monotonic() + grace)


def _kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _sweep(find: Callable[[], list[int]]) -> int:
    """Wait for what a run has left behind; kill and count what does not end."""
    end = time.monotonic() + _AFTERLIFE
    while left := find():
        if time.monotonic() > end:
            for pid in left:
                _kill(pid)
            return len(left)
        time.sleep(0.02)
    return 0


def _in_group(group: int) -> list[int]:
    """The processes of a process group, zombies apart."""
    pids = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                pids.append(process.pid)
    return pids


def _running(config: Path) -> list[int]:
    """The processes that were started with this config."""
    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if str(config) in (p.info["cmdline"] or [])
    ]


def _logs(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("log_*")))
