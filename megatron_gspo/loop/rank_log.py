"""This rank's log file, ``run_dir/logs/rank_N.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.errors import writing
from megatron_gspo.terminal import logged_to


@contextmanager
def rank_log(config: Config) -> Iterator[None]:
    """Within the context what this rank logs is also in its file, at the level that ``tracking``
    has for it.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    level = config.tracking.log_level_of_rank.get(rank, config.tracking.log_level)
    file = Path(config.run_dir) / "logs" / f"rank_{rank}.jsonl"
    with ExitStack() as stack:
        with writing(file):
            stack.enter_context(logged_to(file, level, rank=rank, pid=os.getpid()))
        yield
