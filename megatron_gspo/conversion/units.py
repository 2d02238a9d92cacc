"""Doing many units of work in several processes, each noted as it is done."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_gspo.errors import RunError

UNIT_BYTES = 256 << 20  # of one unit: what a process holds twice at most, and what a kill loses

T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """number: its place in the job. size: bytes, for the progress. work: what the job's function takes."""

    number: int
    size: int
    work: Any


def cut(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Runs of consecutive items of at most `limit` bytes together, or one item that is larger."""
    run: list[T] = []
    total = 0
    for item in items:
        if run and total + size(item) > limit:
            yield run
            run, total = [], 0
        run.append(item)
        total += size(item)
    if run:
        yield run


def run_units(
    do: Callable[[Any], T], units: Sequence[Unit], *, processes: int, done: Callable[[Unit, T], None]
) -> None:
    """`do(unit.work)` for each unit, in `processes` processes or, for 1, in this one; `done` with each result, here.

    Results must be picklable. The first failure ends all and is raised; a process that dies makes a ``RunError``.
    Processes are forked, since others would import everything again: call it before any other thread is started.
    """
    if processes == 1 or len(units) < 2:
        for unit in units:
            done(unit, do(unit.work))
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(processes, len(units)), context, torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(do, unit.work): unit for unit in units}
        try:
            for future in as_completed(futures):
                done(futures[future], future.result())
        except BrokenProcessPool:
            fix = "run the same command again: it goes on; with fewer --processes it takes less memory"
            raise RunError(f"a process of the conversion was killed (out of memory?); {fix}") from None
        finally:
            for future in futures:
                future.cancel()
