"""Policies that are trained, saved and resumed."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.checkpoint.checkpoint_files import RANK_FILE
from megatron_gspo.mcore.policy import Policy, build_policy
from tests.support.configs import adam, model_config
from tests.support.parallel_groups import groups_of

LR = 1e-3
OPTIMIZER = adam(lr=LR, min_lr=1e-5, lr_decay_style="linear", lr_warmup_steps=2, weight_decay=0.1)
STATE = {"prompts": {"position": 7, "order": [2, 0, 1]}, "best": 0.25}


def policy_in(path: str, layout: ParallelConfig, *, distributed_optimizer: bool = True) -> Policy:
    layout = dataclasses.replace(layout, use_distributed_optimizer=distributed_optimizer)
    return build_policy(
        model_config(path), layout, groups_of(layout), optimizer=OPTIMIZER, total_steps=6
    )


def hold_writers() -> Callable[[], None]:
    """Opening a rank's file of a checkpoint for writing blocks until the function that this
    returns is called.
    """
    released = threading.Event()
    writing = os.O_WRONLY | os.O_RDWR

    def hold(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & writing and str(arguments[0]).endswith(RANK_FILE):
            released.wait()

    sys.addaudithook(hold)  # it can't be removed
    return released.set
