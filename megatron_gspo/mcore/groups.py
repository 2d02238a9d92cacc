"""Process groups and seeds: start ``torch.distributed`` and Megatron's parallel state."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; data parallelism takes what is left of the world."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int | None = None


@dataclass(frozen=True)
class Groups:
    """The process groups that the plugin uses, as values to be passed on. ``dp`` leaves context parallelism out."""

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


def current_groups() -> Groups:
    """The groups of Megatron's parallel state, which must be initialised."""
    return Groups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_group(),
        expert_tp=parallel_state.get_expert_tensor_parallel_group(),
        expert_tp_ep=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )


def compute_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def initialize(layout: Layout, *, seed: int, backend: str = "auto", timeout_minutes: float = 30.0) -> Groups:
    """Start ``torch.distributed`` from torchrun's environment, then Megatron's groups and random states.

    ``backend`` is ``auto`` (nccl with CUDA, else gloo), ``gloo`` or ``nccl``. A rank that waits longer than
    ``timeout_minutes`` in a collective raises, so that the death of one rank ends all.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        chosen = ("nccl" if cuda else "gloo") if backend == "auto" else backend
        limit = timedelta(minutes=timeout_minutes)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(chosen, timeout=limit)
        else:  # started without torchrun: a world of one
            dist.init_process_group(chosen, timeout=limit, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return current_groups()


def shutdown() -> None:
    """Destroy Megatron's groups and ``torch.distributed``; safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
