"""Made-up routes: even loads, and as many ranks a token as random routes have."""

import math

import pytest
import torch

from megatron_gspo.tools.rehearse.routing import expert_ids


@pytest.mark.parametrize("experts, k", [(128, 8), (64, 6), (8, 2), (4, 4), (160, 8)])
def test_a_token_has_different_experts_and_every_expert_as_many_tokens(experts, k):
    ids = expert_ids(1000, experts, k)
    assert ids.shape == (1000, k)
    assert all(len(set(row)) == k for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=experts)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("experts", [128, 256])
def test_the_experts_of_a_token_are_on_as_many_ranks_as_random_ones(experts):
    tokens, k, ranks = 16384, 8, 8
    of_rank = experts // ranks
    missed = math.comb(experts - of_rank, k) / math.comb(experts, k)  # by all of a token's experts
    on_rank = torch.zeros(tokens, ranks).scatter(1, expert_ids(tokens, experts, k) // of_rank, 1.0)
    assert abs(on_rank.sum(1).mean() - ranks * (1 - missed)) < 0.1  # 5.34, 5.29


@pytest.mark.parametrize("imbalance, share", [(1.5, 3 / 8), (2.0, 1 / 2), (100.0, 1.0)])
def test_the_first_rank_gets_its_share_and_the_others_the_same(imbalance, share):
    ids = expert_ids(4096, 32, 4, expert_parallel=4, imbalance=imbalance)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=32)
    assert abs(counts[:8].sum() - share * 4 * 4096) <= 1
    for part in (counts[:8], counts[8:]):
        assert part.max() - part.min() <= 1
