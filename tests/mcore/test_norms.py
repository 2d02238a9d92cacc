"""Norms of the torch layers."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_gspo.mcore.norms import RMSNorm


def config(**changes: object) -> SimpleNamespace:
    plain = dict(
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        sequence_parallel=False,
        layernorm_zero_centered_gamma=False,
    )
    return SimpleNamespace(**{**plain, **changes})


def test_norms_carry_the_mark_of_sequence_parallelism():
    for marked in (True, False):
        norm = RMSNorm(config(sequence_parallel=marked), 8)
        assert norm.weight.sequence_parallel is marked


def test_a_zero_centred_norm_multiplies_by_one_more_than_its_weight():
    norm = RMSNorm(config(layernorm_zero_centered_gamma=True), 2, eps=0.0)
    assert norm.weight.tolist() == [0.0, 0.0]
    norm.weight.data = torch.tensor([0.5, -0.5])
    x = torch.tensor([[3.0, 4.0]])  # mean of squares 12.5
    torch.testing.assert_close(norm(x), torch.tensor([[1.5 * 3, 0.5 * 4]]) / 12.5**0.5)


def test_a_small_weight_of_a_zero_centred_norm_is_not_rounded_off():
    """1 + 2**-8 - 2**-10 is 1 in bfloat16, and 3 / 12.5**0.5 has another nearest bfloat16 with
    it than alone.
    """
    norm = RMSNorm(
        config(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16), 2, eps=0.0
    )
    norm.weight.data = torch.tensor([2**-8 - 2**-10, 0.0], dtype=torch.bfloat16)
    output = norm(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    exact, rounded = (
        torch.tensor(weight * 3 / 12.5**0.5).bfloat16() for weight in (1 + 2**-8 - 2**-10, 1.0)
    )
    assert output.dtype is torch.bfloat16 and output[0, 0] == exact != rounded
