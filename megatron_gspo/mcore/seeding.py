"""The generators that code without a seed of its own draws from."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

# Phases of a step; a resumed run may begin with either of the first two.
ROLLOUT, UPDATE, EVALUATION = range(3)


def seed_generators(seed: int, step: int, phase: int) -> None:
    """Seed Python's, numpy's and torch's global generators on this rank, and Megatron's.

    Nothing in this package draws from them after the weights; engines, verifiers and modules of
    one's own may. Seeded before every phase they are a function of what a checkpoint holds, so that
    a resumed run, in any layout, needs no stored state. Python's, numpy's and torch's differ by
    rank; Megatron derives its own from the layout.
    """
    of_rank = np.random.SeedSequence([seed, step, phase, dist.get_rank()]).generate_state(3)
    shared = int(np.random.SeedSequence([seed, step, phase]).generate_state(1)[0])
    tensor_parallel.model_parallel_cuda_manual_seed(shared)
    # The CPU's alone: the GPU's default one is Megatron's to seed.
    torch.default_generator.manual_seed(int(of_rank[2]))
    np.random.seed(of_rank[1])
    random.seed(int(of_rank[0]))
