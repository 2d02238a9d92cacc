"""SIGUSR1 to one rank: all ranks agree to stop."""

from __future__ import annotations

import signal
import threading

import torch.distributed as dist

from megatron_gspo.loop.stop_signal import stop_on_signal
from tests.support.distributed import run_distributed


def hear(rank: int, world_size: int) -> list[bool]:
    heard = []
    before = signal.getsignal(signal.SIGUSR1)
    with stop_on_signal() as agreed:
        heard.append(agreed())
        if rank == 2:
            signal.raise_signal(signal.SIGUSR1)
        heard.append(agreed())
        heard.append(agreed())  # it isn't forgotten
    assert signal.getsignal(signal.SIGUSR1) is before
    with stop_on_signal() as agreed:  # a new run has no request
        heard.append(agreed())
    return heard


def test_all_ranks_give_the_same_answer():
    assert run_distributed(hear, 3) == [[False, True, True, False]] * 3


def listen_in_a_thread(rank: int, world_size: int) -> list[bool]:
    heard: list[bool] = []

    def listen() -> None:
        with stop_on_signal() as agreed:
            heard.append(agreed())

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    dist.barrier()
    return heard


def test_another_thread_than_the_main_one_is_never_asked():
    assert run_distributed(listen_in_a_thread, 1) == [[False]]
