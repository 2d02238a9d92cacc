"""The clipped surrogate by hand: a ratio on a bound is inside, an advantage of 0 is never clipped."""

import pytest
import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.algorithms.surrogate import clipped_surrogate


def test_clip_at_its_bounds():
    objective = preset("grpo", epsilon_low=0.25, epsilon_high=0.25, dual_clip=2.0)
    ratio = torch.tensor([0.5, 0.75, 1.25, 1.5, 2.0, 2.5])
    for advantage, lower, upper, dual in (
        (1.0, [], [3, 4, 5], []),
        (-1.0, [0], [], [5]),
        (0.0, [], [], []),
    ):
        value, clip = clipped_surrogate(objective, ratio, torch.full((6,), advantage))
        found = [[i for i, cut in enumerate(x.tolist()) if cut] for x in (clip.lower, clip.upper, clip.dual)]
        assert found == [lower, upper, dual]
        assert clip.cut.tolist() == [i in (*lower, *upper) for i in range(6)]
        bound = {i: 0.75 for i in lower} | {i: 1.25 for i in upper} | {i: 2.0 for i in dual}
        assert value.tolist() == [advantage * bound.get(i, ratio[i].item()) for i in range(6)]


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_value_and_gradient_are_those_of_the_formula(dual_clip):
    """min(ratio A, clip(ratio) A), with dual clip at least c A where A < 0, differentiated by autograd."""
    g = torch.Generator().manual_seed(0)
    ratio = (torch.randn(400, generator=g, dtype=torch.float64) / 2).exp().requires_grad_()
    advantages = torch.randn(400, generator=g, dtype=torch.float64)
    objective = preset("grpo", epsilon_low=0.2, epsilon_high=0.3, dual_clip=dual_clip)
    value, clip = clipped_surrogate(objective, ratio, advantages)
    expected = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    if dual_clip is not None:
        expected = torch.where(advantages < 0, torch.maximum(expected, dual_clip * advantages), expected)
    torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)
    (got,), (grad,) = (torch.autograd.grad(x.sum(), ratio) for x in (value, expected))
    torch.testing.assert_close(got, grad, rtol=1e-14, atol=0)
    removed = clip.cut if clip.dual is None else clip.cut | clip.dual
    assert torch.equal(removed, grad == 0) and 0 < removed.sum() < 400
    assert not any(x.requires_grad for x in (clip.lower, clip.upper, clip.cut))
