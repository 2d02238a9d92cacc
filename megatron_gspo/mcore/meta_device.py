"""One rank of any world, on paper: Megatron's groups without other processes, its model without memory.

Torch's fake process group answers every collective at once with nothing, and parameters live on the meta device, which
knows sizes only. So one process can ask Megatron itself what a rank of 1,024 would hold.
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

from megatron_gspo.mcore.model import ModelSettings, build_model
from megatron_gspo.mcore.process_groups import Groups, Layout, initialize, shutdown
from megatron_gspo.models import ModelShape


def smallest_world(layout: Layout) -> int:
    """The fewest processes that a layout can have: every part of the model, once or a few times."""
    dense = layout.tensor * layout.pipeline * layout.context
    return math.lcm(dense, layout.expert_tensor * layout.expert * layout.pipeline)


@contextmanager
def paper_rank(layout: Layout, world_size: int, rank: int) -> Iterator[Groups]:
    """Be rank `rank` of `world_size` within the context. Nothing that waits for other ranks may run in it.

    Raises ``RuntimeError`` where ``torch.distributed`` runs already: it knows one world at a time.
    """
    if dist.is_initialized():
        raise RuntimeError("paper_rank needs a process without torch.distributed")
    excepthook = sys.excepthook  # torch's own would go on to print the rank before each line of a traceback
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield initialize(layout, seed=0, gloo_groups=False)
    finally:
        shutdown()
        sys.excepthook = excepthook


def meta_model(shape: ModelShape, layout: Layout, settings: ModelSettings, groups: Groups) -> list[GPTModel]:
    """This rank's model chunks on the meta device, of the torch layers: Transformer Engine's have the same sizes."""
    with torch.device("meta"):
        return build_model(shape, layout, replace(settings, implementation="torch"), groups)
