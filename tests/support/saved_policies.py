"""Policies that are trained, saved and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from megatron_gspo.mcore.checkpoint.save_load import AsyncSave
from megatron_gspo.mcore.model import ModelSettings
from megatron_gspo.mcore.policy import DataParallelSettings, OptimizerSettings, Policy, build_policy
from megatron_gspo.mcore.process_groups import Layout
from tests.support.parallel_groups import groups_of

LR = 1e-3
OPTIMIZER = OptimizerSettings(lr=LR, min_lr=1e-5, schedule="linear", warmup_steps=2, total_steps=6, weight_decay=0.1)
STATE = {"prompts": {"position": 7, "order": [2, 0, 1]}, "best": 0.25}


def policy_in(path: str, layout: Layout, *, distributed_optimizer: bool = True) -> Policy:
    return build_policy(
        path, layout, groups_of(layout), model=ModelSettings(), optimizer=OPTIMIZER,
        data_parallel=DataParallelSettings(distributed_optimizer=distributed_optimizer),
    )


def hold_writers() -> Callable[[AsyncSave], None]:
    """Every process that this one forks from now on stops at once; the function lets a save's writers go on."""
    rank = os.getpid()
    os.register_at_fork(after_in_child=lambda: os.getppid() == rank and os.kill(os.getpid(), signal.SIGSTOP))

    def release(save: AsyncSave) -> None:
        for pid in save.writers:
            os.kill(pid, signal.SIGCONT)

    return release
