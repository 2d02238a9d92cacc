"""Log-probabilities from hidden states: refusals, budgets, the shape of tiles."""

import functools
import math

import pytest
import torch

from megatron_gspo.parallel.vocabulary_tiles import TILE, tile_elements, tile_shape

from .calls import call_log_probs
from .test_log_probs import inputs, peak_bytes

VOCABULARY_WORDS = "the rows of all ranks"
LABEL_WORDS = "give masked positions label 0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be > 0; score greedy samples with 1.0"),
        ({"temperature": math.nan}, "temperature=nan must be > 0; score greedy samples with 1.0"),
        ({"vocab_size": 61}, f"vocab_size=61 is not in [1, 60]: {VOCABULARY_WORDS}"),
        ({"vocab_size": 0}, f"vocab_size=0 is not in [1, 60]: {VOCABULARY_WORDS}"),
        (
            {"labels": torch.arange(20) - 1},
            f"labels reach from -1 to 18, outside vocab_size=60; {LABEL_WORDS}",
        ),
        (
            {"labels": torch.arange(20) + 41},
            f"labels reach from 41 to 60, outside vocab_size=60; {LABEL_WORDS}",
        ),
        (
            {"labels": torch.zeros(19, dtype=torch.int64)},
            "labels (19,) must be [20] or [20, K]: one or K per token of all ranks",
        ),
        (
            {"labels": torch.zeros(20, 1, 1, dtype=torch.int64)},
            "labels (20, 1, 1) must be [20] or [20, K]: one or K per token of all ranks",
        ),
        (
            {"weight": torch.zeros(60, 9)},
            "hidden (20, 8) and weight (60, 9) do not match; pass [tokens, h] and [rows, h]",
        ),
        (
            {"weight": torch.zeros(60, 8, 1)},
            "hidden (20, 8) and weight (60, 8, 1) do not match; pass [tokens, h] and [rows, h]",
        ),
        (
            {"hidden": torch.zeros(20, 8, 1)},
            "hidden (20, 8, 1) and weight (60, 8) do not match; pass [tokens, h] and [rows, h]",
        ),
    ],
)
def test_refuses(change, message):
    hidden, weight, labels, *_ = inputs(20, 60, 8)
    arguments = {"hidden": hidden, "weight": weight, "labels": labels} | change
    with pytest.raises(ValueError) as error:
        call_log_probs(**arguments)
    assert str(error.value) == message


def test_sequence_parallel_without_a_group_is_one_process():
    hidden, weight, labels, *_ = inputs(6, 60, 8)
    plain = call_log_probs(hidden, weight, labels)[0]
    assert torch.equal(call_log_probs(hidden, weight, labels, sequence_parallel=True)[0], plain)


def test_logits_are_kept_where_they_and_a_tile_fit_and_a_gradient_is_wanted():
    """6 tokens, 60 rows, width 8: 360 elements of logits and one tile of 60 * (3 * 6 + 2 * 8) =
    2,040.
    """
    hidden, weight, labels, *_ = inputs(6, 60, 8)
    for dtype, size in ((torch.float32, 4), (torch.float64, 8)):
        for elements, kept in ((2400, True), (2399, False)):
            call = [hidden.to(dtype).requires_grad_(), weight.to(dtype), labels]
            log_probs, _ = call_log_probs(*call, chunk_bytes=elements * size)
            *_, last = log_probs.grad_fn.saved_tensors
            assert (last.shape == (6, 60)) == kept


@pytest.mark.parametrize("use_entropy", [False, True])
def test_logits_that_are_kept_change_no_bit(use_entropy):
    """Six tiles, the same with both budgets."""
    tokens, rows, width = TILE["cpu"][0] + 100, 2 * TILE["cpu"][1] + 77, 8
    case = inputs(tokens, rows, width)[:3]
    budget = 4 * (tokens * rows + tile_elements(*TILE["cpu"], width))
    results = []
    for chunk_bytes in (budget, budget - 4):
        hidden, weight = (x.clone().requires_grad_() for x in case[:2])
        outputs = call_log_probs(
            hidden, weight, case[2], with_entropy=True, chunk_bytes=chunk_bytes
        )
        kept = outputs[0].grad_fn.saved_tensors[7:]
        assert len(kept) == (6 if chunk_bytes == budget else 0)
        outputs[use_entropy].sum().backward()
        results.append([*outputs, hidden.grad, weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tiles_keep_to_the_budget():
    for tokens in (1, 37, 1024, 30_000):
        for rows in (1, 300, 152_000):
            for budget in (3_000, 10**6, 10**8):
                chunk, vocabulary = tile_shape(tokens, rows, 64, budget, TILE["cpu"])
                assert 1 <= chunk <= tokens and 1 <= vocabulary <= rows
                assert tile_elements(chunk, vocabulary, 64) <= budget
                assert chunk * vocabulary <= TILE["cpu"][0] * TILE["cpu"][1]


TOKENS = 64
VOCABULARY = 4000
UNIT = 4 * TOKENS * VOCABULARY  # bytes of the logits; the default tile holds all of them


@pytest.mark.parametrize(("with_entropy", "buffers"), [(False, 1), (True, 2)])
def test_scoring_holds_no_more_than_its_buffers(with_entropy, buffers):
    """One tile of logits, another for the entropy; logits are not kept where no gradient is
    wanted.
    """
    hidden, weight, labels, *_ = inputs(TOKENS, VOCABULARY, 2)

    def score():
        with torch.no_grad():
            hidden.requires_grad_()
            return call_log_probs(hidden, weight, labels, with_entropy=with_entropy)

    def score_frozen():
        return call_log_probs(hidden.detach(), weight, labels, with_entropy=with_entropy)

    for call in (score, score_frozen):
        assert buffers * UNIT <= peak_bytes(call) <= (buffers + 0.2) * UNIT


@pytest.mark.parametrize(
    ("with_entropy", "use_entropy"), [(False, False), (True, False), (True, True)]
)
def test_training_holds_no_more_than_its_buffers(with_entropy, use_entropy):
    """The logits are too many to keep: forward and backward come one after the other, and each
    needs a second buffer only for an entropy, the backward only where a gradient comes through it.
    """
    hidden, weight, labels, *_ = inputs(TOKENS, VOCABULARY, 2)
    peaks = []

    def forward(live, budget):
        return call_log_probs(live, weight, labels, with_entropy=with_entropy, chunk_bytes=budget)

    for budget, kept in ((5 * UNIT, 1), (UNIT * 7 // 2, 0)):
        results = []
        call = functools.partial(forward, hidden.clone().requires_grad_(), budget)
        peaks.append(peak_bytes(lambda call=call, results=results: results.extend(call())))
        assert peaks[-1] <= (kept + 1 + with_entropy + 0.2) * UNIT
        assert peak_bytes(results[use_entropy].sum().backward) <= (1 + use_entropy + 0.2) * UNIT
    assert peaks[0] - peaks[1] >= 0.9 * UNIT  # that is what keeping them costs


def test_second_derivatives_are_refused():
    hidden, weight, labels, factor, _ = inputs(6, 60, 8)
    log_probs, _ = call_log_probs(hidden.requires_grad_(), weight, labels)
    loss = (log_probs * factor.requires_grad_()).sum()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
