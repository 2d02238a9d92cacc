"""Stop a run on request, after the step that is under way and with a checkpoint: SIGUSR1 to any of its ranks.

SIGTERM is for those who can't wait (``guard``): a step takes minutes at scale, and torchrun kills 30 seconds after it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_gspo.mcore.process_groups import compute_device


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Listen for SIGUSR1; yields a function that says whether any rank has got one by now.

    It is a collective: all ranks call it at the same place of the loop and get the same answer, although a signal
    reaches them at different times or only one of them. Outside the main thread, where Python hears no signals, this
    rank never asks.
    """
    asked = threading.Event()
    hears = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGUSR1, lambda *_: asked.set()) if hears else None

    def agreed() -> bool:
        flag = torch.tensor([float(asked.is_set())], device=compute_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    try:
        yield agreed
    finally:
        if hears:
            signal.signal(signal.SIGUSR1, before)
