"""One rank of any world, simulated: Megatron's process groups without other processes, its model
without memory.

Torch's fake process group completes every collective immediately without data, and parameters are
on the meta device, which stores sizes only. So one process can build the model of any rank of a
large world.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_gspo.config import ModelConfig, ParallelConfig
from megatron_gspo.mcore.megatron_options import MegatronOptions
from megatron_gspo.mcore.model import build_model
from megatron_gspo.mcore.process_groups import ProcessGroups, initialize, shutdown
from megatron_gspo.models import ModelShape


def smallest_world(parallel: ParallelConfig) -> int:
    """The smallest number of processes of a layout."""
    experts = parallel.expert_tensor_size * parallel.expert_model_parallel_size
    return math.lcm(parallel.model_parallel_size, experts * parallel.pipeline_model_parallel_size)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Within the context ``torch.distributed`` runs as ``rank`` of ``world_size``, without other
    processes.

    Raises ``RuntimeError`` where it is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError("a simulated rank needs a process without torch.distributed")
    excepthook = sys.excepthook  # torch's own prints the rank before each line of a traceback
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        sys.excepthook = excepthook
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def simulated_rank(parallel: ParallelConfig, world_size: int, rank: int) -> Iterator[ProcessGroups]:
    """Within the context this process is rank `rank` of `world_size`. Data from other ranks is
    undefined.

    Raises ``RuntimeError`` where ``torch.distributed`` is initialised already.
    """
    with fake_process_group(rank, world_size):
        try:
            yield initialize(parallel, seed=0, gloo_groups=False)
        finally:
            shutdown(keep_distributed=True)


def meta_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    model: ModelConfig,
    groups: ProcessGroups,
    options: MegatronOptions = MegatronOptions(),
) -> list[GPTModel]:
    """This rank's model chunks on the meta device, of torch layers; Transformer Engine's have
    the same sizes.
    """
    with torch.device("meta"):
        return build_model(shape, parallel, replace(model, implementation="torch"), groups, options)
