"""The clipped loss of a value model: by hand, its gradient, and any cut of a mini-batch."""

import math

import pytest
import torch

from megatron_gspo.algorithms import value_loss


def tensors(*rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


# What moved towards its return by more than the clip, what moved away by more, and what is within
# it.
VALUES = [1.0, -1.0, 0.25, 9.0]
OLD = [0.0, 0.0, 0.0, 9.0]
RETURNS = [2.0, 2.0, 2.0, 9.0]
MASK = [1.0, 1.0, 1.0, 0.0]


def test_by_hand():
    values, old, returns, mask = tensors(VALUES, OLD, RETURNS, MASK)
    values.requires_grad_()
    loss, metrics = value_loss(
        values, old_values=old, returns=returns, loss_mask=mask, num_tokens=3, value_clip=0.5
    )
    # clipped at 0.5: (0.5 - 2)^2; further away than at -0.5: (-1 - 2)^2; (0.25 - 2)^2
    assert loss.item() == pytest.approx((1.5**2 + 3.0**2 + 1.75**2) / 6)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0, -3 / 3, -1.75 / 3, 0])
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"critic/loss": loss.item(), "critic/clip_fraction": 1 / 3, "critic/value": 0.25 / 3}
    )


@pytest.mark.parametrize(("value", "bound"), [(4.0, 3.5), (2.0, 2.5)])
def test_a_value_is_clipped_on_both_sides_of_the_old_one(value, bound):
    """From 3 towards returns of 9 and of -3."""
    values, old, returns, mask = tensors([value], [3.0], [9.0 if value > 3 else -3.0], [1.0])
    loss, metrics = value_loss(
        values, old_values=old, returns=returns, loss_mask=mask, num_tokens=1, value_clip=0.5
    )
    assert loss.item() == (bound - returns.item()) ** 2 / 2 and metrics["critic/clip_fraction"] == 1


def test_without_a_clip_it_is_half_the_squared_error():
    values, old, returns, mask = tensors(VALUES, OLD, RETURNS, MASK)
    loss, metrics = value_loss(
        values, old_values=old, returns=returns, loss_mask=mask, num_tokens=3
    )
    assert (
        loss.item() == pytest.approx((1 + 9 + 1.75**2) / 6) and metrics["critic/clip_fraction"] == 0
    )


def test_what_is_masked_is_never_read():
    values, old, returns, mask = tensors(VALUES, OLD, RETURNS, MASK)
    clean, _ = value_loss(
        values, old_values=old, returns=returns, loss_mask=mask, num_tokens=3, value_clip=0.5
    )
    for tensor in (values, old, returns):
        tensor[3] = math.nan
    values.requires_grad_()
    loss, metrics = value_loss(
        values, old_values=old, returns=returns, loss_mask=mask, num_tokens=3, value_clip=0.5
    )
    loss.backward()
    assert loss == clean and values.grad.isfinite().all() and metrics["critic/value"].isfinite()


def test_shares_of_any_cut_add_up():
    g = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(50, generator=g, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(50, generator=g) < 0.7).double()

    def share(indices):
        inputs = dict(old_values=old[indices], returns=returns[indices], loss_mask=mask[indices])
        return value_loss(values[indices], **inputs, num_tokens=int(mask.sum()), value_clip=0.2)

    loss, metrics = share(slice(None))
    losses, shares_of_metrics = zip(
        *(share(slice(*ends)) for ends in ((0, 13), (13, 14), (14, 50))), strict=True
    )
    torch.testing.assert_close(sum(losses), loss)
    for name, value in metrics.items():
        total = sum(shares[name] for shares in shares_of_metrics)
        torch.testing.assert_close(total, value, check_dtype=False)
    assert 0 < metrics["critic/clip_fraction"] < 1


@pytest.mark.parametrize("name", ["old_values", "returns", "loss_mask"])
def test_shapes_are_checked(name):
    inputs = dict.fromkeys(("old_values", "returns", "loss_mask"), torch.zeros(3)) | {
        name: torch.zeros(2)
    }
    with pytest.raises(ValueError) as error:
        value_loss(torch.zeros(3), **inputs, num_tokens=1)
    assert str(error.value) == f"{name} has shape (2,), values (3,): all must be [T]"
    with pytest.raises(ValueError, match="all must be"):
        value_loss(torch.zeros(1, 3), **dict.fromkeys(inputs, torch.zeros(1, 3)), num_tokens=1)
