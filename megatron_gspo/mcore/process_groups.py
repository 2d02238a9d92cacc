"""Process groups and seeds: start ``torch.distributed`` and Megatron's parallel state."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_gspo.config import ConfigError, ParallelConfig
from megatron_gspo.errors import RunError, first_line
from megatron_gspo.launch_environment import world_size
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_TELLS_AFTER = 20.0  # seconds of waiting for the other processes


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups that the plugin uses, as values to be passed on.

    ``dp`` leaves context parallelism out.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_tp: dist.ProcessGroup
    expert_tp_ep: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage of this rank's pipeline."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)


def current_groups() -> ProcessGroups:
    """The groups of Megatron's parallel state, which must be initialised."""
    return ProcessGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_group(),
        expert_tp=parallel_state.get_expert_tensor_parallel_group(),
        expert_tp_ep=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )


def every_group() -> dict[str, dist.ProcessGroup]:
    """Every kind of group that training communicates in, by name, in one order on all ranks;
    Megatron's parallel state must be initialised."""
    groups = current_groups()
    return {
        "world": dist.group.WORLD,
        **{field.name: getattr(groups, field.name) for field in fields(groups)},
        "expert_dp": parallel_state.get_expert_data_parallel_group(),
        "model": parallel_state.get_model_parallel_group(),
    }


def compute_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def start(*, backend: str = "auto", timeout_minutes: float = 30.0) -> dist.Store:
    """Start ``torch.distributed`` from torchrun's environment, or as a world of one; returns the
    store of all ranks.

    ``backend`` is ``auto`` (nccl with CUDA, else gloo), ``gloo`` or ``nccl``. A collective that
    takes longer than ``timeout_minutes`` raises. Raises ``ConfigError`` for a backend that this
    machine lacks, ``RunError`` where the ranks don't find each other.
    """
    cuda = torch.cuda.is_available()
    if backend == "nccl" and not (cuda and dist.is_nccl_available()):
        problem = f"needs a GPU, and torch {torch.__version__} finds none here"
        raise ConfigError(
            "parallel.backend",
            backend,
            problem,
            "set it to auto or gloo, or install torch for CUDA",
        )
    world = world_size()
    if cuda:
        torch.cuda.set_device(_local_gpu())
    limit = timedelta(minutes=timeout_minutes)
    try:
        store: dist.Store = dist.HashStore()
        rank = 0
        if world > 1:
            with _told_of_waiting(world):
                store, rank, world = next(iter(dist.rendezvous("env://", timeout=limit)))
            store.set_timeout(limit)
            # torchrun keeps one store over its restarts, with the addresses of processes that
            # ended: hence the prefix
            store = dist.PrefixStore(
                f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
            )
        chosen = ("nccl" if cuda else "gloo") if backend == "auto" else backend
        groups_store = dist.PrefixStore("process_groups", store)
        dist.init_process_group(
            chosen, timeout=limit, store=groups_store, rank=rank, world_size=world
        )
    except (ValueError, RuntimeError) as error:
        if "EADDRINUSE" in str(error):
            port = os.environ.get("MASTER_PORT")
            raise RunError(
                f"MASTER_PORT={port} is in use on this machine; end the process that listens there,"
                " or set another port for all processes (torchrun --master-port, or --standalone)"
            ) from error
        fix = (
            "start all of them with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            " for all"
        )
        raise RunError(
            f"the {world} processes did not find each other in {timeout_minutes:g} minutes"
            f" ({first_line(error)}); {fix}"
        ) from error
    return store


def _local_gpu() -> int:
    """The GPU of this process. Raises ``RunError`` where the node has fewer GPUs than processes."""
    index = int(os.environ.get("LOCAL_RANK", 0))
    count = torch.cuda.device_count()
    if index >= count:
        raise RunError(
            f"LOCAL_RANK={index}: this node has {count} visible GPUs, one for each process; start"
            " fewer processes here (torchrun --nproc-per-node) or correct CUDA_VISIBLE_DEVICES"
        )
    return index


@contextlib.contextmanager
def _told_of_waiting(world: int) -> Iterator[None]:
    """One line where other processes are waited for long: they may not have been started."""

    def tell() -> None:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        logger.warning(
            f"rank {os.environ.get('RANK')} waits at {address} for the {world} processes that"
            " WORLD_SIZE names; to train in one process use megatron-gspo train"
        )

    timer = threading.Timer(_TELLS_AFTER, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def initialize(parallel: ParallelConfig, *, seed: int, gloo_groups: bool = True) -> ProcessGroups:
    """`start` ``torch.distributed`` unless it is initialized, then Megatron's process groups and
    random states.

    gloo_groups: create Megatron's second set of data-parallel groups, for communication between
    CPUs.
    """
    minutes = parallel.distributed_timeout_minutes
    if not dist.is_initialized():
        start(backend=parallel.backend, timeout_minutes=minutes)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        create_gloo_process_groups=gloo_groups,
        distributed_timeout_minutes=minutes,  # passed to a timedelta, so fractions are allowed
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return current_groups()


def shutdown(*, keep_distributed: bool = False) -> None:
    """Destroy Megatron's groups and, unless it is to be kept, ``torch.distributed``; safe to
    call twice.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized() and not keep_distributed:
        dist.destroy_process_group()
