"""One rank's statistics and gradients by tiles, against the whole logits in float64. Tile shapes are in
test_log_probs_limits.py."""

from dataclasses import replace

import pytest
import torch

from megatron_gspo.parallel.vocabulary_tiles import (
    RowFactors,
    Tiling,
    local_gradients,
    local_statistics,
    operand,
)

TOKENS, ROWS, PADDING, WIDTH, FIRST = 7, 10, 2, 3, 20
TILING = Tiling(tile=(3, 4), rows=ROWS, first=FIRST, scale=0.5, dtype=torch.float64, keep_logits=False)


def case():
    """hidden, weight with padding rows, labels: some on this rank, one before and one after its rows."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g, dtype=torch.float64)
    weight = torch.randn(ROWS + PADDING, WIDTH, generator=g, dtype=torch.float64)
    weight[ROWS:] = 50.0
    return hidden, weight, FIRST + torch.tensor([0, 3, 4, 9, -1, 10, 7])


def logits_of(hidden, weight):
    return 0.5 * hidden @ weight[:ROWS].T


@pytest.mark.parametrize("tile", [(3, 4), (1, 1), (7, 10), (100, 100)])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_statistics_against_the_whole_logits(tile, keep_logits):
    hidden, weight, labels = case()
    found = local_statistics(hidden, weight, labels, replace(TILING, tile=tile, keep_logits=keep_logits), True)
    logits = logits_of(hidden, weight)
    maximum = logits.amax(1)
    exponentials = (logits - maximum[:, None]).exp()
    torch.testing.assert_close(found.maximum, maximum)
    torch.testing.assert_close(found.total, exponentials.sum(1))
    torch.testing.assert_close(found.moment, (exponentials * (logits - maximum[:, None])).sum(1))
    own = [logits[t, label - FIRST].item() if 0 <= label - FIRST < ROWS else 0.0 for t, label in enumerate(labels)]
    assert found.label.tolist() == pytest.approx(own)
    parts = logits.split(min(tile[1], ROWS), dim=1)
    torch.testing.assert_close(found.tile_maxima, torch.stack([part.amax(1) for part in parts]))
    sums = torch.stack([(part - part.amax(1, keepdim=True)).exp().sum(1) for part in parts])
    torch.testing.assert_close(found.tile_totals, sums)
    assert found.packed().shape == (4, TOKENS)
    assert (found.kept is None) == (not keep_logits)
    if keep_logits:
        assert found.kept.sort().values.tolist() == pytest.approx(logits.flatten().sort().values.tolist())


def test_without_the_entropy_there_is_no_moment():
    found = local_statistics(*case(), TILING, False)
    assert found.moment is None and found.packed().shape == (3, TOKENS)


def test_a_rank_of_padding_only_adds_nothing():
    hidden, weight, labels = case()
    found = local_statistics(hidden, weight, labels, replace(TILING, rows=0), True)
    assert not found.total.any() and not found.moment.any() and not found.label.any()
    assert (found.maximum == torch.finfo(torch.float64).min).all() and found.packed().isfinite().all()


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("with_slope", [False, True])
def test_gradients_against_the_formula(with_slope, keep_logits, needed):
    """d loss / d x_j = p_j (slope (x_j - m) + constant) + [j = label] label, p over this rank's rows."""
    hidden, weight, labels = case()
    tiling = replace(TILING, keep_logits=keep_logits)
    found = local_statistics(hidden, weight, labels, tiling, True)
    g = torch.Generator().manual_seed(1)
    slope, constant, label = torch.randn(3, TOKENS, generator=g, dtype=torch.float64)
    probabilities = found.tile_totals * (found.tile_maxima - found.maximum).exp() / found.total
    factors = RowFactors(found.maximum, probabilities, slope if with_slope else None, constant, label)
    grad_hidden, grad_weight = local_gradients(hidden, weight, labels, found.kept, factors, tiling, needed)

    logits = logits_of(hidden, weight)
    grad = logits.softmax(1) * (constant[:, None] + with_slope * slope[:, None] * (logits - found.maximum[:, None]))
    for t, column in enumerate((labels - FIRST).tolist()):
        if 0 <= column < ROWS:
            grad[t, column] += label[t]
    if needed[0]:  # the caller puts the scale into the factors
        torch.testing.assert_close(grad_hidden, grad @ weight[:ROWS])
    if needed[1]:
        torch.testing.assert_close(grad_weight[:ROWS], grad.T @ hidden)
        assert grad_weight.shape == weight.shape and not grad_weight[ROWS:].any()
    assert (grad_hidden is None, grad_weight is None) == (not needed[0], not needed[1])


def test_a_label_factor_is_optional():
    hidden, weight, labels = case()
    found = local_statistics(hidden, weight, labels, TILING, False)
    probabilities = found.tile_totals * (found.tile_maxima - found.maximum).exp() / found.total
    factors = RowFactors(found.maximum, probabilities, None, torch.ones(TOKENS, dtype=torch.float64), None)
    grad_hidden, _ = local_gradients(hidden, weight, labels, None, factors, TILING, (True, False))
    torch.testing.assert_close(grad_hidden, logits_of(hidden, weight).softmax(1) @ weight[:ROWS])


def test_factors_are_cut_by_tokens():
    maximum, constant = torch.arange(4.0), torch.arange(4.0) + 10
    factors = RowFactors(maximum, torch.arange(8.0).view(2, 4), None, constant, None).cut(1, 3)
    assert factors.maximum.tolist() == [[1], [2]] and factors.constant.tolist() == [[11], [12]]
    assert factors.tile_probabilities.tolist() == [[[1], [2]], [[5], [6]]]
    assert factors.slope is None and factors.label is None
    whole = RowFactors(maximum, torch.zeros(2, 4), maximum + 1, constant, maximum + 2).cut(2, 3)
    assert (whole.slope.tolist(), whole.label.tolist()) == ([[3]], [[4]])


def test_products_are_in_the_tiling_s_dtype_on_a_cpu():
    low = torch.ones(2, 3, dtype=torch.bfloat16)
    assert operand(low, low, torch.float32).dtype == torch.float32
    same = torch.ones(2, 3)
    assert operand(same, low, torch.float32) is same
