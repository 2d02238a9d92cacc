"""Made-up routes."""

import pytest
import torch

from megatron_gspo.tools.rehearse.routing import expert_ids


def load(ids: torch.Tensor, experts: int) -> list[int]:
    return torch.bincount(ids.flatten(), minlength=experts).tolist()


def test_every_expert_gets_the_same() -> None:
    assert load(expert_ids(64, 8, 2), 8) == [16] * 8


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 2.0, 100.0])
def test_experts_of_a_token_differ(imbalance: float) -> None:
    ids = expert_ids(100, 16, 4, expert_parallel=4, imbalance=imbalance)
    assert ids.shape == (100, 4)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert 0 <= int(ids.min()) and int(ids.max()) < 16


def test_the_first_rank_gets_its_multiple_and_the_others_share_the_rest() -> None:
    loads = load(expert_ids(128, 16, 4, expert_parallel=4, imbalance=2.0), 16)
    assert sum(loads[:4]) == 2 * 128 * 4 // 4
    assert max(loads[4:]) - min(loads[4:]) <= 1


def test_one_rank_has_all_tokens_however_large_the_imbalance() -> None:
    assert load(expert_ids(64, 8, 2, expert_parallel=1, imbalance=3.0), 8) == [16] * 8
