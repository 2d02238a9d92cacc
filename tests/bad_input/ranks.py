"""Several ranks of the command line without torchrun, as on several machines: each has an error
stream of its own.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

import yaml

from megatron_gspo.train import main
from tests.support.distributed import end_process, fork_server
from tests.support.ports import free_port


@dataclass(frozen=True)
class Ended:
    """A rank that has ended: its exit code (minus the signal that killed it), its error stream,
    and when.
    """

    code: int | None
    text: str
    seconds: float


def run_ranks(
    config: dict[str, Any],
    count: int,
    folder: Path,
    *,
    limit: float = 290.0,
    patience: float | None = None,
) -> list[Ended]:
    """Run ``count`` ranks until they end; one that is left after ``limit`` seconds has the code
    None.

    patience: seconds for the last one, after all others have ended. No process outlives the call.
    """
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    begin = monotonic()
    logs = [folder / f"rank_{rank}.txt" for rank in range(count)]
    children = [
        fork_server().Process(target=_rank, args=(rank, count, port, str(file), str(logs[rank])))
        for rank in range(count)
    ]
    ended: dict[int, float] = {}
    try:
        for child in children:
            child.start()
        while len(ended) < count and monotonic() < begin + limit:
            alive = [child.sentinel for rank, child in enumerate(children) if rank not in ended]
            wait(alive, timeout=max(0.0, begin + limit - monotonic()))
            for rank, child in enumerate(children):
                if rank not in ended and not child.is_alive():
                    ended[rank] = monotonic() - begin
            if patience is not None and len(ended) == count - 1:
                limit = min(limit, monotonic() - begin + patience)
        codes = [child.exitcode for child in children]
    finally:
        for child in children:
            end_process(child)
    return [
        Ended(codes[rank], logs[rank].read_text(), ended.get(rank, monotonic() - begin))
        for rank in range(count)
    ]


def _rank(rank: int, world_size: int, port: int, config: str, log: str) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    main([config])
