"""Policies that are trained, saved and resumed."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.checkpoint.save_load import AsyncSave
from megatron_gspo.mcore.policy import Policy, build_policy
from tests.support.configs import adam, model_config
from tests.support.parallel_groups import groups_of

LR = 1e-3
OPTIMIZER = adam(lr=LR, min_lr=1e-5, lr_decay_style="linear", lr_warmup_steps=2, weight_decay=0.1)
STATE = {"prompts": {"position": 7, "order": [2, 0, 1]}, "best": 0.25}


def policy_in(path: str, layout: ParallelConfig, *, distributed_optimizer: bool = True) -> Policy:
    layout = dataclasses.replace(layout, use_distributed_optimizer=distributed_optimizer)
    return build_policy(model_config(path), layout, groups_of(layout), optimizer=OPTIMIZER, total_steps=6)


def hold_writers() -> Callable[[AsyncSave], None]:
    """Every process that this one forks from now on stops at once; the function lets a save's writers continue."""
    rank = os.getpid()
    os.register_at_fork(after_in_child=lambda: os.getppid() == rank and os.kill(os.getpid(), signal.SIGSTOP))

    def release(save: AsyncSave) -> None:
        for pid in save.writers:
            os.kill(pid, signal.SIGCONT)

    return release
