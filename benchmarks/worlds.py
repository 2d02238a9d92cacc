"""Worlds of several processes on this machine that wait, idle, until it is their turn to be timed.

Several worlds of different sizes exist at once, so that they are timed interleaved: a machine that gets slower
slows all of them.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common import ROOT, Seconds, by_turns

Prepare = Callable[..., Mapping[str, Callable[[], None]]]  # (rank, size, *args) -> what can be timed, by name
SLOW_IMPORTS = ["torch", "torch.distributed", "transformers", "megatron_gspo.mcore.train_step"]


@functools.cache
def fork_server() -> Any:
    """A multiprocessing context whose children start from a process that has the slow packages loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server and its children read it when they load torch
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW_IMPORTS)
    return context


class World:
    """``size`` processes of one gloo group; each has called ``prepare(rank, size, *args)``, a module-level function.

    ``limit``: seconds that preparation or one timing may take. Raises ``RuntimeError`` with the traceback of a process
    that fails, or where one takes longer.
    """

    def __init__(self, size: int, prepare: Prepare, *args: Any, limit: float = 120.0) -> None:
        self.size, self.limit = size, limit
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = fork_server().Pipe()
            process = fork_server().Process(
                target=_serve, args=(rank, size, self._folder.name, theirs, prepare, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def ready(self) -> None:
        """Wait until all processes have prepared."""
        self._answers()

    def time(self, name: str) -> Seconds:
        """Run what ``name`` stands for in all processes at once: the wall-clock time from a barrier to a barrier, of
        the process that was first to leave the first one, and the processor time of all processes together."""
        for pipe in self._pipes:
            pipe.send(name)
        taken = self._answers()
        return Seconds(max(seconds.wall for seconds in taken), sum(seconds.cpu for seconds in taken))

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.limit
        while len(answers) < self.size:
            waiting = [self._pipes[rank] for rank in range(self.size) if rank not in answers]
            found = wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
            if not found:
                raise RuntimeError(f"a world of {self.size} processes took longer than {self.limit:.0f} s")
            for pipe in found:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    answers[rank] = "ended without a word"
                if isinstance(answers[rank], str):
                    raise RuntimeError(f"rank {rank} of {self.size}: {answers[rank]}")
        return [answers[rank] for rank in range(self.size)]


def in_turns(contestants: Mapping[Any, tuple[World, str]], turns: int, seconds: float, *,
             warmup: int = 1) -> dict[Any, list[Seconds]]:
    """Time every (world, name) ``by_turns``, after ``warmup`` runs of each."""
    measures = {key: functools.partial(world.time, name) for key, (world, name) in contestants.items()}
    for _ in range(warmup):
        for measure in measures.values():
            measure()
    return by_turns(measures, repeats=turns, seconds=seconds)


def _serve(rank: int, size: int, folder: str, pipe: Connection, prepare: Prepare, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
        contestants = prepare(rank, size, *args)
        pipe.send(True)
        while True:
            function = contestants[pipe.recv()]
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            dist.barrier()
            pipe.send(Seconds(time.perf_counter() - wall, time.process_time() - cpu))
    except EOFError:  # the parent is gone
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
