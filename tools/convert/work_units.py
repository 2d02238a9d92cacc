"""Units of work in several processes (``concurrent.futures``), each recorded when it is
finished.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_gspo.errors import RunError

# Of one unit: a process holds it at most twice, and an interruption loses it.
UNIT_BYTES = 256 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Workers:
    """How a conversion runs.

    processes: 1 runs in this process. unit_bytes: size of a unit. report: called with the bytes
    done, including those of an interrupted conversion, and the total.
    """

    processes: int = 1
    unit_bytes: int = UNIT_BYTES
    report: Callable[[int, int], None] = lambda done, total: None


@dataclass(frozen=True)
class Unit:
    """number: its index in the job.

    size: bytes, for the progress bar. work: the argument of the job's function.
    """

    number: int
    size: int
    work: Any


def cut(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Groups of consecutive items of at most `limit` bytes in total, or one larger item."""
    run: list[T] = []
    total = 0
    for item in items:
        if run and total + size(item) > limit:
            yield run
            run = []
            total = 0
        run.append(item)
        total += size(item)
    if run:
        yield run


def run_units(
    do: Callable[[Any], T],
    units: Sequence[Unit],
    workers: Workers,
    *,
    finished: Collection[int] = (),
    record: Callable[[int, T], None] = lambda number, result: None,
) -> None:
    """`do(unit.work)` for each unit that is not `finished` (numbers), in the processes of
    `workers`.

    record: called in this process with each unit's number and result, which must be picklable,
    before ``workers.report``. The first failure ends all units and is raised; a process that dies
    raises ``RunError``. Processes end with this one, also when it is killed. As with any start
    method but fork, a script that uses several has ``if __name__ == "__main__":``.
    """
    left = [unit for unit in units if unit.number not in finished]
    total = sum(unit.size for unit in units)
    done = total - sum(unit.size for unit in left)
    for unit, result in _results(do, left, workers.processes):
        record(unit.number, result)
        done += unit.size
        workers.report(done, total)


def _start_worker() -> None:
    import torch  # not at the top: the command line reads UNIT_BYTES before anything heavy is imported

    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this a worker waits for its next unit for ever when the conversion is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a process of multiprocessing"
    parent.join()
    os._exit(1)


def _results(
    do: Callable[[Any], T], units: Sequence[Unit], processes: int
) -> Iterator[tuple[Unit, T]]:
    """Each unit with its result, in the order of completion."""
    if processes == 1 or len(units) < 2:
        yield from ((unit, do(unit.work)) for unit in units)
        return
    # Forked from a server of one thread, which imports once: a fork of this process, with the
    # progress bar's thread and those of libraries, can hang or crash.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([do.__module__])
    with ProcessPoolExecutor(min(processes, len(units)), context, _start_worker) as pool:
        futures = {pool.submit(do, unit.work): unit for unit in units}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            fix = "run the same command again to continue; fewer --processes take less memory"
            raise RunError(
                f"a process of the conversion was killed (out of memory?); {fix}"
            ) from None
        finally:
            for future in futures:
                future.cancel()
