"""One process for each rehearsed rank, a few at a time: ``one_rank`` writes a record, or fails
with a message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from megatron_gspo.errors import InputError
from megatron_gspo.tools.rehearse.records import RankRecord, read_record
from megatron_gspo.tools.rehearse.roles import PlayedRank
from megatron_gspo.tools.rehearse.summary import FailedRank

# Bytes of the host that the rehearsal of one rank of a large model may take.
RANK_MEMORY = 5 * 2**30
_OUTPUT = 6000  # characters of a failed process's output that are kept
Done = Callable[[PlayedRank, "RankRecord | FailedRank"], None]


@dataclass(frozen=True)
class RankJob:
    """What is the same for all ranks. layers: of the model, instead of its own number; imbalance:
    tokens of the first expert rank by its fair share. module: that is run as ``python -m``."""

    config: str
    overrides: tuple[str, ...]
    world: int
    layers: int | None = None
    imbalance: float = 1.0
    module: str = "megatron_gspo.tools.rehearse.one_rank"

    def command(self, rank: int, output: Path) -> list[str]:
        layers = [] if self.layers is None else ["--layers", str(self.layers)]
        return [
            sys.executable,
            "-m",
            self.module,
            self.config,
            *self.overrides,
            "--world",
            str(self.world),
            "--rank",
            str(rank),
            "--imbalance",
            str(self.imbalance),
            *layers,
            "--output",
            str(output),
        ]


def default_jobs() -> int:
    """Processes at a time: one for each core that this process may use, as far as memory allows."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores, psutil.virtual_memory().available // RANK_MEMORY))


def rehearse_ranks(
    job: RankJob, played: Sequence[PlayedRank], jobs: int, done: Done
) -> tuple[list[RankRecord], list[FailedRank]]:
    """Rehearse each rank in a process of its own, ``jobs`` at a time, and call ``done`` as each
    ends.

    Returns the records and the failures, both by rank. Raises ``InputError`` where a process finds
    the input invalid.
    """
    records: list[RankRecord] = []
    failed: list[FailedRank] = []
    with (
        tempfile.TemporaryDirectory(prefix="rehearsal_") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        running = {pool.submit(_rehearse_one, job, one, Path(folder)): one for one in played}
        try:
            for future in as_completed(running):
                result = future.result()
                if isinstance(result, RankRecord):
                    records.append(result)
                else:
                    failed.append(result)
                done(running[future], result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(records, key=lambda record: record.rank), sorted(
        failed, key=lambda failure: failure.rank
    )


def _rehearse_one(job: RankJob, played: PlayedRank, folder: Path) -> RankRecord | FailedRank:
    output = folder / f"rank_{played.rank}.pickle"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        job.command(played.rank, output),
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    if ran.returncode == 0:
        record = read_record(output)
        output.unlink()
        return replace(record, roles=played.roles, stands_for=played.stands_for)
    message = _message(ran.stderr, ran.returncode)
    if ran.returncode == InputError.exit_code:
        raise InputError(message)
    return FailedRank(played.rank, message, ran.stderr[-_OUTPUT:])


def _message(output: str, code: int) -> str:
    """The last line that a process wrote, without the label of its error."""
    if code < 0:
        return f"its process was ended by signal {-code}; a smaller --jobs needs less memory"
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"its process ended with exit code {code}"
    return last.removeprefix("config error: ").removeprefix("error: ")
