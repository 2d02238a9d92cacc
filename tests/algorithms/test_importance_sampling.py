import math

import pytest
import torch

from megatron_gspo.algorithms import (
    Segments,
    mismatch_metrics,
    sequence_divergence_mask,
    sequence_importance_weights,
    sequence_rejection_mask,
    token_divergence_mask,
    token_importance_weights,
    token_rejection_mask,
)
from megatron_gspo.algorithms.kl import binary_kl, k3

D = torch.tensor([0.0, math.log(3), -math.log(4), 0.5, math.nan, -0.1])
ROLLOUT = torch.full((6,), -1.0)
MASK = torch.tensor([1.0, 1, 1, 1, 0, 1])
IDS = torch.tensor([0, 0, 0, 1, 1, 2])


def test_mismatch_by_hand():
    got = mismatch_metrics(ROLLOUT + D, ROLLOUT, MASK, num_tokens=5)
    d = [0.0, math.log(3), -math.log(4), 0.5, -0.1]
    assert got["mismatch/k3"].item() == pytest.approx(
        sum(math.exp(x) - 1 - x for x in d) / 5, rel=1e-5
    )
    assert got["mismatch/abs_diff"].item() == pytest.approx(sum(map(abs, d)) / 5, rel=1e-6)
    assert got["mismatch/abs_diff_max"].item() == pytest.approx(math.log(4))
    assert got["mismatch/outside_band"].item() == pytest.approx(2 / 5)  # 3 and 1/4; e^0.5 is inside


def test_k3_of_tiny_differences_keeps_its_digits():
    d = torch.full((4,), 1e-3, dtype=torch.float64)
    old = torch.zeros(4)
    got = mismatch_metrics(d.float(), old, torch.ones(4), num_tokens=4)["mismatch/k3"].item()
    assert got == pytest.approx(5e-7, rel=2e-3)


def test_sequence_weights_are_length_normalised():
    got = sequence_importance_weights(ROLLOUT + D, ROLLOUT, Segments(MASK, IDS, 3))
    first, second, third = (3 / 4) ** (1 / 3), math.exp(0.5), math.exp(-0.1)  # not 3/4
    torch.testing.assert_close(got, torch.tensor([first] * 3 + [second] * 2 + [third]))
    got = sequence_importance_weights(ROLLOUT + 3, ROLLOUT, Segments(MASK, IDS, 3), threshold=1.5)
    torch.testing.assert_close(got, torch.full((6,), 1.5))


def test_no_gradient_passes():
    """Metrics and weights are constants, also for inputs with a gradient."""
    live = (ROLLOUT + 0.1).requires_grad_()
    assert not any(
        x.requires_grad for x in mismatch_metrics(live, ROLLOUT, MASK, num_tokens=5).values()
    )
    assert not token_importance_weights(live, ROLLOUT, MASK).requires_grad
    assert not sequence_importance_weights(live, ROLLOUT, Segments(MASK, IDS, 3)).requires_grad


def test_a_double_precision_rollout_does_not_change_the_dtype():
    for dtype in (torch.float32, torch.float64):
        got = token_importance_weights((ROLLOUT + 0.1).to(dtype), ROLLOUT.double(), MASK)
        assert got.dtype == dtype
        assert (
            sequence_importance_weights(
                (ROLLOUT + 0.1).to(dtype), ROLLOUT.double(), Segments(MASK, IDS, 3)
            ).dtype
            == dtype
        )
    got = token_importance_weights(ROLLOUT + 0.1, ROLLOUT.bfloat16(), MASK)
    assert got.dtype == torch.float32


def test_metrics_of_no_tokens():
    none = torch.zeros(0)
    got = mismatch_metrics(none, none, none, num_tokens=1)
    assert {name: value.item() for name, value in got.items()} == dict.fromkeys(got, 0.0)
    assert {value.shape for value in got.values()} == {()}


def test_the_band_and_the_default_threshold():
    """A ratio of 2 is on the edge and still inside; the threshold of 2 is reached just beyond
    it.
    """
    inside = math.log(2) - 1e-4
    outside = math.log(2) + 1e-4
    for d, share in ((inside, 0.0), (-inside, 0.0), (outside, 1.0), (-outside, 1.0)):
        got = mismatch_metrics(
            torch.tensor([d - 1]), torch.tensor([-1.0]), torch.ones(1), num_tokens=1
        )
        assert got["mismatch/outside_band"] == share
    edge = mismatch_metrics(
        torch.tensor([math.log(2)]), torch.zeros(1), torch.ones(1), num_tokens=1
    )
    assert edge["mismatch/outside_band"] == 0
    wide = torch.full((6,), 3.0) + ROLLOUT
    assert token_importance_weights(wide, ROLLOUT, torch.ones(6)).tolist() == pytest.approx(
        [2.0] * 6
    )
    got = sequence_importance_weights(wide, ROLLOUT, Segments(torch.ones(6), IDS, 3))
    assert got.tolist() == pytest.approx([2.0] * 6)
    assert (
        token_importance_weights(wide, ROLLOUT, torch.ones(6), threshold=1.0).tolist() == [1.0] * 6
    )
    for cap in (float("nan"), 0.0, -1.0):
        with pytest.raises(ValueError, match="threshold = "):
            token_importance_weights(wide, ROLLOUT, torch.ones(6), threshold=cap)


LOWER, CAP, BAND, KPOP, K3 = 0.9, 1.05, (0.85, 1.15), 0.005, 0.01  # each cuts some and not all


def naive(train, rollout, mask, ids, level):
    """(weights, kept by the band, kept by the divergence) token by token, in Python floats."""
    weights = []
    inside = []
    close = []
    for t, chosen in enumerate(mask):
        of = [t] if level == "token" else [u for u, i in enumerate(ids) if i == ids[t]]
        d = [train[u] - rollout[u] for u in of if mask[u]]
        ratio = math.exp(sum(d) / len(d)) if d else 1.0
        weights.append(max(min(ratio, CAP), LOWER))
        inside.append(bool(chosen) and BAND[0] <= ratio <= BAND[1])
        if level == "token":
            divergence = max(
                naive_binary_kl(train[t], rollout[t]), naive_binary_kl(rollout[t], train[t])
            )
        else:
            divergence = sum(math.exp(x) - 1 - x for x in d) / max(len(d), 1)
        close.append(bool(chosen) and divergence <= (KPOP if level == "token" else K3))
    return weights, inside, close


def naive_binary_kl(log_p, log_q):
    """Of "this token or another"; 1e-8 as in verl, since the others may have no probability
    left.
    """
    p = math.exp(log_p)
    q = math.exp(log_q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_and_masks_against_a_naive_loop(level):
    """Of 8 batches: truncated and raised weights, the band of the ratio, KPop's binary KL by token,
    the mean of k3 by sequence."""
    trained = left = close = 0
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 6, (80,), generator=g).sort().values
        # A sequence without a trained token.
        mask = (torch.rand(80, generator=g) < 0.7) & (ids != 3)
        rollout = -0.1 - 3 * torch.rand(80, generator=g, dtype=torch.float64)
        scale = 0.05 + 0.15 * torch.rand(6, generator=g)[ids]
        train = (
            rollout
            + 0.1 * torch.randn(6, generator=g)[ids]
            + scale * torch.randn(80, generator=g).double()
        )
        train = train.clamp(max=-1e-3)
        weights, inside, within = naive(
            train.tolist(), rollout.tolist(), mask.tolist(), ids.tolist(), level
        )
        if level == "sequence":
            of_weights = sequence_importance_weights
            of_masks = sequence_rejection_mask
            of_divergence = sequence_divergence_mask
            where = Segments(mask, ids, 6)
            largest = K3
        else:
            of_weights = token_importance_weights
            of_masks = token_rejection_mask
            of_divergence = token_divergence_mask
            where = mask
            largest = KPOP
        got = of_weights(train, rollout, where, threshold=CAP, lower=LOWER)
        torch.testing.assert_close(got[mask], torch.tensor(weights, dtype=torch.float64)[mask])
        assert got[mask].min() == LOWER or level == "sequence"
        assert of_masks(train, rollout, where, lower=BAND[0], upper=BAND[1]).tolist() == inside
        assert of_divergence(train, rollout, where, largest=largest).tolist() == within
        trained = trained + int(mask.sum())
        left = left + sum(inside)
        close = close + sum(within)
    assert 0.1 < left / trained < 0.9 and 0.1 < close / trained < 0.9


def test_a_ratio_on_a_bound_is_inside():
    d = torch.tensor([0.0, -0.1, 0.1])
    given = d, torch.zeros(3), torch.ones(3)
    assert token_rejection_mask(*given, lower=1.0, upper=2.0).tolist() == [True, False, True]
    assert token_rejection_mask(*given, lower=0.5, upper=1.0).tolist() == [True, True, False]


def test_a_divergence_on_the_threshold_is_kept():
    ours = torch.tensor([0.6]).log()
    theirs = torch.tensor([0.3]).log()
    mask = torch.tensor([1.0])
    largest = max(float(binary_kl(ours, theirs)), float(binary_kl(theirs, ours)))
    assert token_divergence_mask(ours, theirs, mask, largest=largest).tolist() == [True]
    response = Segments(mask, torch.tensor([0]), 1)
    assert sequence_divergence_mask(
        ours, theirs, response, largest=float(k3(ours - theirs))
    ).tolist() == [True]
