from __future__ import annotations

import random

import numpy as np
import torch

from megatron_gspo.mcore.seeding import ROLLOUT, UPDATE, seed_generators
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of


def draws(rank: int, world_size: int) -> list[tuple[float, float, float]]:
    groups_of(parallel())
    numbers = []
    for step, phase in ((0, ROLLOUT), (0, UPDATE), (1, ROLLOUT), (0, ROLLOUT)):
        seed_generators(7, step, phase)
        numbers.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    return numbers


def test_draws_depend_on_step_phase_and_rank_alone():
    first, second = run_distributed(draws, 2)
    for numbers in (first, second):
        assert numbers[0] == numbers[3], "the same step and phase"
        assert len({value for draw in numbers[:3] for value in draw}) == 9
    assert not set(first[0]) & set(second[0])
