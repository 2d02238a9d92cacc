"""Stop a run after the current step, with a checkpoint: SIGUSR1 to any of its ranks.

SIGTERM ends a run at once (``failures``): a step takes minutes at scale, and torchrun kills 30
seconds after SIGTERM.
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
    """Handle SIGUSR1; yields a function that returns whether any rank has received one.

    The function is a collective: all ranks call it at the same point of the loop and get the same
    answer, although the signal reaches them at different times, or only one of them. Outside the
    main thread, where Python handles no signals, this rank never requests a stop.
    """
    requested = threading.Event()
    handles = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGUSR1, lambda *_: requested.set()) if handles else None

    def stop_requested() -> bool:
        flag = torch.tensor([float(requested.is_set())], device=compute_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    try:
        yield stop_requested
    finally:
        if handles:
            signal.signal(signal.SIGUSR1, before)
