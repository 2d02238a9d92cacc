"""The kernels of the log-prob head against float64, over rows that don't fill their tiles."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_gspo.kernels.operators import (
    comparison_gradient,
    logit_comparison,
    logit_gradient,
    logit_statistics,
)
from megatron_gspo.parallel import (
    LogProbOptions,
    log_probs_from_hidden,
    teacher_tiles,
    vocabulary_tiles,
)
from megatron_gspo.parallel.log_probs import TeacherHead, divergence_from_hidden
from megatron_gspo.parallel.vocabulary_tiles import _Scratch, _summarize
from tests.kernels.errors import FLOAT32, assert_near, check_operator

# a logit, widths below, of and above a tile, and the vocabulary of Qwen3
SHAPES = [(1, 1), (3, 7), (2, 2048), (5, 2049), (1, 151_936)]
SCALE = 5.0  # of the logits: differences of 40 within a row


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shift", [0.0, 10_000.0, -10_000.0])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_statistics(rows, width, shift):
    logits = SCALE * draw(rows, width, seed=0) + shift
    exact = logits.double()
    maximum = exact.amax(1)
    difference = exact - maximum[:, None]
    terms = difference.exp()
    total = terms.sum(1)
    for count in (2, 3):
        # rows of a larger tensor, as the caller has them
        statistics = torch.full((count, 4, rows), math.nan)[:, 1]
        logit_statistics(logits, statistics)
        assert torch.equal(statistics[0].double(), maximum)
        assert_near(statistics[1], 1 / total, torch.float32)
        if count == 3:
            assert_near(statistics[2], (terms * difference).sum(1) / total, torch.float32)


def test_statistics_are_those_of_the_torch_form():
    logits = SCALE * draw(6, 300, seed=0)
    ours = torch.empty(3, 6)
    logit_statistics(logits, ours)
    composite = torch.empty(3, 6)
    _summarize(composite, logits.clone(), [torch.empty(6, 300), torch.empty(6, 300)])
    assert torch.allclose(ours, composite, rtol=1e-5, atol=1e-6)


def test_what_is_not_a_number_is_in_the_statistics():
    logits = draw(3, 50, seed=0)
    logits[1, 7] = math.nan
    statistics = torch.empty(3, 3)
    logit_statistics(logits, statistics)
    assert statistics[1:].isnan().any(0).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_gradient(rows, width, dtype):
    """The columns are those from 11 on; labels are before, in and behind them, and may repeat."""
    first = 11
    logits = SCALE * draw(rows, width, seed=0)
    columns = torch.tensor([width // 2, 3 - first, width, 0, 2 * width])[:rows]
    labels = first + torch.stack((columns, columns, torch.full_like(columns, width - 1)), dim=1)
    maximum = logits.amax(1)
    log_total = (logits - maximum[:, None]).logsumexp(1)
    slope, constant, *of_labels = draw(5, rows, seed=1)
    factors = torch.stack((maximum, log_total, slope, constant, *of_labels))
    difference = logits.double() - maximum.double()[:, None]
    expected = (difference - log_total.double()[:, None]).exp()
    expected *= slope.double()[:, None] * difference + constant.double()[:, None]
    for row, row_columns in enumerate((labels - first).tolist()):
        for of_label, column in zip(of_labels, row_columns, strict=True):
            if 0 <= column < width:
                expected[row, column] += of_label[row].double()
    wide = torch.full((len(factors), rows + 3), math.nan)
    wide[:, 2 : 2 + rows] = factors
    actual = logit_gradient(logits, labels, first, wide[:, 2 : 2 + rows], dtype)
    assert actual.dtype == dtype
    assert_near(actual, expected, dtype)


@pytest.mark.parametrize("count", [(), (5,)])
@pytest.mark.parametrize("kept", [True, False])
def test_the_head_with_kernels_is_the_head_without(monkeypatch, kept, count):
    """Values and gradients of log-probs and entropies, in tiles and with a temperature."""
    hidden = draw(13, 16, seed=0)
    weight = draw(70, 16, seed=1)
    labels = torch.randint(67, (13, *count), generator=torch.Generator().manual_seed(2))
    budget = 2**20 if kept else 2**12
    options = LogProbOptions(0.7, vocab_size=67, with_entropy=True, chunk_bytes=budget)
    of_log_probs = draw(13, *count, seed=3)
    of_entropy = draw(13, seed=4)

    def run() -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        log_probs, entropy = log_probs_from_hidden(*leaves, labels, options)
        loss = (of_log_probs * log_probs).sum() + (of_entropy * entropy).sum()
        return [log_probs, entropy, *torch.autograd.grad(loss, leaves)]

    composite = run()
    monkeypatch.setattr(vocabulary_tiles, "row_kernels_apply", lambda x, name: True)
    with mock.patch.object(_Scratch, "views", autospec=True, side_effect=_Scratch.views) as views:
        for ours, expected in zip(run(), composite, strict=True):
            assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)
    scratch = [call.args[0] for call in views.call_args_list]
    assert {len(each.buffers) for each in scratch} == {1}, "the kernels need no exponentials"


@pytest.mark.parametrize("shift", [0.0, 10_000.0])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_comparison(rows, width, shift):
    logits = SCALE * draw(rows, width, seed=0) + shift
    teacher_logits = SCALE * draw(rows, width, seed=1) - shift
    statistics = torch.full((4, 4, rows), math.nan)[:, 1]
    logit_comparison(logits, teacher_logits, statistics)
    x, z = (
        values.double() - values.double().amax(1)[:, None] for values in (logits, teacher_logits)
    )
    assert torch.equal(statistics[0], teacher_logits.amax(1))
    assert_near(statistics[1], z.exp().sum(1), torch.float32)
    for actual, terms in ((statistics[2], x.exp() * (x - z)), (statistics[3], z.exp() * (z - x))):
        assert bool(((actual.double() - terms.sum(1)).abs() <= FLOAT32 * terms.abs().sum(1)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_gradient_beside_a_teacher(rows, width, dtype):
    logits = SCALE * draw(rows, width, seed=0)
    teacher_logits = SCALE * draw(rows, width, seed=1)
    labels = torch.full((rows, 2), width // 2 + 11)
    x, z = (
        values.double() - values.double().amax(1)[:, None] for values in (logits, teacher_logits)
    )
    slope, constant, first_label, second_label, reverse, forward = draw(6, rows, seed=2).double()
    factors = torch.stack(
        (
            logits.amax(1).double(),
            x.logsumexp(1),
            slope,
            constant,
            first_label,
            second_label,
            teacher_logits.amax(1).double(),
            z.logsumexp(1),
            reverse,
            forward,
        )
    )
    inner = slope[:, None] * x + constant[:, None] - reverse[:, None] * z
    expected = x.softmax(1) * inner - z.softmax(1) * forward[:, None]
    expected[:, width // 2] += first_label + second_label
    actual = comparison_gradient(logits, teacher_logits, labels, 11, factors.float(), dtype)
    assert actual.dtype == dtype
    assert_near(actual, expected, dtype)


@pytest.mark.parametrize("kept", [True, False])
def test_divergences_with_kernels_are_those_without(monkeypatch, kept):
    hidden, weight = draw(13, 16, seed=0), draw(70, 16, seed=1)
    teacher = TeacherHead(draw(13, 8, seed=5), draw(70, 8, seed=6))
    labels = torch.randint(67, (13,), generator=torch.Generator().manual_seed(2))
    options = LogProbOptions(0.7, vocab_size=67, chunk_bytes=2**20 if kept else 2**12)
    of_divergences = draw(13, 2, seed=3)

    def run() -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        log_probs, _, divergences = divergence_from_hidden(*leaves, labels, teacher, options)
        loss = log_probs.sum() + (of_divergences * divergences).sum()
        return [log_probs, divergences, *torch.autograd.grad(loss, leaves)]

    composite = run()
    for module in (vocabulary_tiles, teacher_tiles):
        monkeypatch.setattr(module, "row_kernels_apply", lambda x, name: True)
    for ours, expected in zip(run(), composite, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_no_rows():
    statistics = torch.empty(2, 0)
    logit_statistics(torch.empty(0, 5), statistics)
    labels = torch.empty(0, 1, dtype=torch.int64)
    gradient = logit_gradient(torch.empty(0, 5), labels, 0, torch.empty(5, 0), torch.bfloat16)
    assert gradient.shape == (0, 5)


def test_shapes_of_the_operators():
    logits = draw(3, 8, seed=0)
    check_operator(logit_statistics, (logits, torch.zeros(3, 3)))
    labels = torch.tensor([[0, 4], [9, 2], [3, 3]])
    arguments = (logits, labels, 2, draw(6, 3, seed=1), torch.bfloat16)
    check_operator(logit_gradient, arguments)
    teacher_logits = draw(3, 8, seed=2)
    check_operator(logit_comparison, (logits, teacher_logits, torch.zeros(4, 3)))
    arguments = (logits, teacher_logits, labels, 2, draw(10, 3, seed=1), torch.bfloat16)
    check_operator(comparison_gradient, arguments)
