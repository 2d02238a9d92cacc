"""The objective is a function of the mini-batch alone: cut, order, padding and masked values
have no effect.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gspo.algorithms import (
    Segments,
    sequence_divergence_mask,
    sequence_importance_weights,
    sequence_rejection_mask,
)
from tests.algorithms.reference import (
    Batch,
    complete_preset,
    random_batch,
)
from tests.algorithms.splits import (
    Outcome,
    add_up,
    assert_same,
    evaluate,
    evaluate_in_pieces,
    evaluate_on_ranks,
)

from .strategies import VALUES, batches, integers_each, objectives, poisoned


@given(objective=objectives, batch=batches(), ranks=st.integers(1, 3), data=st.data())
def test_any_cut_adds_up_to_the_whole(objective, batch, ranks, data):
    """Sequences over micro-batches and data ranks, tokens over context ranks, both any way."""
    piece = data.draw(integers_each(batch.num_segments, 3), label="micro-batch of each sequence")
    owner = torch.tensor(
        data.draw(integers_each(len(batch.segment_ids), ranks - 1), label="rank"), dtype=torch.long
    )
    assert_same(
        evaluate_in_pieces(objective, batch, piece, owner, ranks), evaluate(objective, batch)
    )


def _reordered(outcome: Outcome, order: torch.Tensor) -> Outcome:
    return Outcome(outcome.loss, outcome.grad[order], outcome.entropy_grad[order], outcome.metrics)


@given(objective=objectives, batch=batches(), data=st.data())
def test_padding_does_not_matter(objective, batch, data):
    """Untrained positions of any content anywhere, and sequences of nothing else."""
    total = len(batch.segment_ids)
    positions = torch.tensor(
        data.draw(st.lists(st.integers(0, total), max_size=6)), dtype=torch.long
    )
    owners = torch.tensor(
        data.draw(integers_each(len(positions), batch.num_segments + 1)), dtype=torch.long
    )
    order = torch.cat([torch.arange(total), positions]).argsort(stable=True)
    holes = torch.zeros(len(positions), dtype=torch.float64)
    fields = {name: torch.cat([getattr(batch, name), holes])[order] for name in VALUES}
    padded = Batch(
        **fields,
        loss_mask=torch.cat([batch.loss_mask, holes.float()])[order],
        segment_ids=torch.cat([batch.segment_ids, owners])[order],
        num_segments=batch.num_segments + 2,
    )
    got = evaluate(objective, poisoned(padded, shift=1))
    kept = order.argsort()[:total]
    added = order.argsort()[total:]
    assert not got.grad[added].any() and not got.entropy_grad[added].any()
    assert_same(_reordered(got, kept), evaluate(objective, batch))


@given(objective=objectives, batch=batches(), shift=st.integers(1, 4))
def test_what_is_masked_is_never_read(objective, batch, shift):
    """Bit for bit the same with other NaN, infinity and numbers under the mask, and with
    another mask value.
    """
    expected = evaluate(objective, batch)
    other = poisoned(batch, shift=shift)
    got = evaluate(objective, Batch(**{**vars(other), "loss_mask": 3.0 * other.loss_mask}))
    assert got.loss == expected.loss and got.metrics == expected.metrics
    assert torch.equal(got.grad, expected.grad)
    assert torch.equal(got.entropy_grad, expected.entropy_grad)
    assert not got.grad[batch.loss_mask == 0].any()


# Of whole sequences: a weight, and what leaves the loss.
OF_SEQUENCES = {
    "weights": partial(sequence_importance_weights, threshold=1.5),
    "ratio": partial(sequence_rejection_mask, lower=0.9, upper=1.1),
    "divergence": partial(sequence_divergence_mask, largest=0.05),
}


@given(batch=batches(), data=st.data())
@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_corrections_of_sequences_over_any_split(name, batch, data):
    owner = torch.tensor(data.draw(integers_each(len(batch.segment_ids), 1)), dtype=torch.long)

    def correct(tokens, sum_over_context=None):
        segments = Segments(
            tokens.loss_mask, tokens.segment_ids, tokens.num_segments, sum_over_context
        )
        return OF_SEQUENCES[name](tokens.log_probs, tokens.old_log_probs, segments)

    whole = correct(batch)
    brought = []
    shards = [(owner == rank).nonzero().flatten() for rank in (0, 1)]

    def keep(sums):
        brought.append(sums)
        return sums

    for held in shards:
        correct(batch.take(held), keep)
    for held in shards:
        got = correct(batch.take(held), lambda x: brought[0] + brought[1])
        torch.testing.assert_close(got.double(), whole[held].double(), rtol=1e-12, atol=0)
    assert (whole >= 0).all() and (whole <= 1.5 * (1 + 1e-12)).all()


def test_float32_ratios_are_the_same_on_every_context_rank():
    batch = random_batch(6, drift=5e-4)
    owner = torch.arange(batch.segment_ids.numel()) % 2
    gspo = complete_preset("gspo")
    outcomes = evaluate_on_ranks(gspo, batch, batch, owner, 2, torch.float32)
    merged = add_up([outcome.metrics for outcome in outcomes])
    whole = evaluate(gspo, batch, dtype=torch.float32).metrics
    assert merged["ratio_max"] == whole["ratio_max"] and merged["ratio_min"] == whole["ratio_min"]
