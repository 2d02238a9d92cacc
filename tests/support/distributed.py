"""Run a function on several real processes with a gloo process group between them.

    from tests.support.distributed import run_distributed

    def check(rank, world_size, value):          # a module-level function: children import it by name
        total = torch.tensor([value + rank])
        torch.distributed.all_reduce(total)
        return total

    results = run_distributed(check, 4, 10)      # [check's return value on rank 0, 1, 2, 3]

Children come from a fork server that has imported torch (and any slow package that the tests have
imported) once, so a call costs tenths of a second, not one import of torch per process. Still check
many cases a call.
"""

import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SLOW_IMPORTS = (
    "torch",
    "torch.distributed",
    "transformers",
    "megatron_gspo.mcore.train_step",
    "tests.equivalence.run",
    "tests.fault_injection.process_harness",
)


def collectives_so_far(group: Any = None) -> int:
    """How many collectives this process has started on ``group`` (None: the world). Take
    differences.
    """
    return (group or dist.group.WORLD)._get_sequence_number_for_group()


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in processes of one group; return its values by rank.

    ``fn`` is a module-level function; arguments and return values are pickled (tensors come back on
    the CPU). Raises RuntimeError with the traceback of the rank that failed first, or TimeoutError
    with every rank's stack after ``timeout`` seconds. No process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="run_distributed_") as folder:
        context = fork_server()
        processes = [
            context.Process(
                target=_child, args=(fn, rank, world_size, args, folder, timeout, backend)
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, Path(folder), timeout)
        finally:
            for process in processes:
                end_process(process)
        return [
            torch.load(Path(folder) / f"result_{rank}", weights_only=False, map_location="cpu")
            for rank in range(world_size)
        ]


def end_process(process: Any) -> None:
    """Kill a child and what it has started, and reap it."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)  # a group of its own, which may outlive it
    except ProcessLookupError:  # gone, or not yet a group
        if process.is_alive():
            process.kill()
    process.join()


@functools.cache
def fork_server() -> Any:
    """A multiprocessing context whose children start from a process that has the slow packages
    loaded.
    """
    # The server and its children read it when they load torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    preloaded = [name for name in SLOW_IMPORTS if name in sys.modules]
    if "megatron_gspo.mcore" in sys.modules:
        # Imports Megatron, as all of mcore does.
        preloaded.append("megatron_gspo.mcore.process_groups")
    context.set_forkserver_preload([*preloaded, "tests.support.frozen_heap"])
    return context


def start_fork_server() -> None:
    """Start the server of `fork_server` now. A process has one: the conversion, which asks for one
    of its own, would leave the tests after it a server that has loaded nothing of theirs.
    """
    fork_server()
    ensure_running()


def _join(processes: list[Any], folder: Path, timeout: float) -> None:
    """Wait for all processes; the first failure ends the wait, for its peers may hang in a
    collective.
    """
    # Children end themselves at the timeout; 15 s to start.
    deadline = time.monotonic() + timeout + 15.0
    running = list(processes)
    while running:
        wait(
            [process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic())
        )
        running = [process for process in running if process.is_alive()]
        failed = [process for process in processes if process.exitcode not in (None, 0)]
        if failed and running:
            # A cause may be about to be written.
            wait([process.sentinel for process in running], timeout=0.5)
        if failed or (running and time.monotonic() >= deadline):
            raise _failure(processes, folder, timeout)


def _failure(processes: list[Any], folder: Path, timeout: float) -> Exception:
    """The cause. A rank that timed out or was killed makes its peers' collectives fail: look
    there first.
    """
    stacks = [path for path in sorted(folder.glob("stack_*")) if path.stat().st_size]
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    if stacks or not any(codes.values()):
        text = "\n".join(
            f"--- {path.name.removeprefix('stack_')}\n{path.read_text()}" for path in stacks
        )
        return TimeoutError(
            f"{len(processes)} processes, not done in {timeout:g} s; stacks by rank:\n{text}"
        )
    killed = {rank: code for rank, code in codes.items() if code is not None and code < 0}
    errors = sorted(
        path.read_text().split("\n", 1) + [path.name] for path in folder.glob("error_*")
    )
    if killed or not errors:
        return RuntimeError(
            f"processes ended without a traceback (rank: exit code): {killed or codes}"
        )
    _, text, name = errors[0]
    return RuntimeError(
        f"rank {name.removeprefix('error_')} of {len(processes)} failed first:\n{text}"
    )


def _child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple,
    folder: str,
    timeout: float,
    backend: str,
) -> None:
    os.setsid()  # so that what it starts can be killed with it
    stack = open(Path(folder) / f"stack_{rank}", "w")
    faulthandler.dump_traceback_later(timeout, exit=True, file=stack)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        limit = timedelta(seconds=timeout + 10.0)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
        result = fn(rank, world_size, *args)
        dist.barrier()  # ranks connect at their own pace: one that left now would cut off those that still do
        torch.save(result, Path(folder) / f"result_{rank}")
        dist.destroy_process_group()
    except BaseException:
        error = Path(folder) / f"error_{rank}"
        error.with_name(f"writing_{rank}").write_text(f"{time.time()}\n{traceback.format_exc()}")
        # The parent never reads half a traceback.
        os.replace(error.with_name(f"writing_{rank}"), error)
        stack.flush()
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
