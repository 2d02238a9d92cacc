"""From samples to gradients: scheduled over data ranks, packed, padded and cut over context ranks, the loss and
every response token's gradient are those of the samples one by one.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gspo.data.packing import (
    context_parallel_shard,
    count_trained,
    pack,
    padded_length,
    schedule,
    unpack,
)
from megatron_gspo.parallel import zigzag_indices
from tests.algorithms.reference import call_policy_loss, complete_preset
from tests.support.samples import make_sample

NAMES = ("gspo", "gspo_token", "grpo", "dapo", "dr_grpo")
shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=8)


@st.composite
def sample_lists(draw):
    """Samples with any mask, also empty; old log-probs near enough that some tokens are clipped, not all."""
    samples = []
    for i, (prompt, response) in enumerate(draw(shapes)):
        mask = draw(st.lists(st.booleans(), min_size=response, max_size=response))
        sample = make_sample(prompt, response, seed=i, mask=mask)
        rng = np.random.default_rng(draw(st.integers(0, 2**31)))
        sample.advantages = np.full(response, rng.normal(), dtype=np.float32)
        sample.old_log_probs = -rng.random(response).astype(np.float32)
        samples.append(sample)
    return samples


def log_probs_of(sample):
    """Stand-in of a model's log-probs of a response: a function of the sample alone."""
    rng = np.random.default_rng(int(sample.tokens.sum()))
    return torch.from_numpy(
        sample.old_log_probs + rng.normal(0, 0.1, sample.response_length).astype(np.float32)
    )


def one_by_one(name, samples, counts):
    """Loss and gradient [R] of every sample, each in a call of its own, unpacked."""
    total, grads = 0.0, []
    for sample in samples:
        log_probs = log_probs_of(sample).double().requires_grad_()
        loss, _ = call_policy_loss(
            complete_preset(name),
            log_probs=log_probs,
            old_log_probs=torch.from_numpy(sample.old_log_probs).double(),
            advantages=torch.from_numpy(sample.advantages).double(),
            loss_mask=torch.from_numpy(sample.loss_mask),
            segment_ids=torch.zeros(sample.response_length, dtype=torch.long),
            num_sequences=counts[0],
            num_tokens=counts[1],
            num_segments=1,
        )
        loss.backward()
        total += loss.item()
        grads.append(log_probs.grad.numpy())
    return total, grads


def packed_log_probs(batch, samples):
    """The same numbers at their packed positions; NaN where no response token is predicted."""
    values = torch.full((int(batch.cu_seqlens[-1]),), float("nan"))
    for start, index in zip(batch.cu_seqlens.tolist(), batch.sample_ids, strict=False):
        first = start + samples[index].prompt_length - 1
        values[first : first + samples[index].response_length] = log_probs_of(samples[index])
    return values


def over_context(name, batch, log_probs, cp_size):
    """Sum of the ranks' losses, and their gradients at their places in the whole batch."""
    places = [zigzag_indices(batch.cu_seqlens, rank, cp_size) for rank in range(cp_size)]
    shards = [context_parallel_shard(batch, rank, cp_size) for rank in range(cp_size)]

    def call(rank, sum_over_context):
        shard, own = shards[rank], log_probs[places[rank]].double().requires_grad_()
        loss, _ = call_policy_loss(
            complete_preset(name),
            log_probs=own,
            old_log_probs=shard.old_log_probs.double(),
            advantages=shard.advantages.double(),
            loss_mask=shard.loss_mask,
            segment_ids=shard.segment_ids,
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
            num_segments=batch.num_segments,
            sum_over_context=sum_over_context,
        )
        loss.backward()
        return loss.item(), own.grad

    brought = []
    for rank in range(cp_size):
        call(rank, lambda x: brought.append(x) or x)
    total, grad = 0.0, torch.full(log_probs.shape, float("nan"), dtype=torch.float64)
    for rank in range(cp_size):
        loss, grad[places[rank]] = call(rank, lambda x: sum(brought))
        total += loss
    return total, grad


@given(
    samples=sample_lists(),
    name=st.sampled_from(NAMES),
    num_ranks=st.integers(1, 3),
    cp_size=st.integers(1, 3),
    total_multiple=st.integers(1, 4),
    slack=st.integers(0, 40),
    multiple_of=st.integers(1, 2),
)
def test_loss_and_gradient_of_every_response_token(
    samples, name, num_ranks, cp_size, total_multiple, slack, multiple_of
):
    multiple = 1 if cp_size == 1 else 2 * cp_size
    counts = tuple(max(count, 1) for count in count_trained(samples))
    lengths = [padded_length(sample.length, multiple) for sample in samples]
    plan = schedule(lengths, num_ranks=num_ranks, max_tokens=max(lengths) + slack, multiple_of=multiple_of)
    loss, grads = 0.0, [None] * len(samples)
    for indices in (indices for rank in plan for indices in rank):
        chosen = [samples[i] for i in indices]
        batch = pack(
            chosen,
            sequence_multiple=multiple,
            total_multiple=total_multiple,
            num_sequences=counts[0],
            num_tokens=counts[1],
            optional=["old_log_probs"],
        )
        part, grad = over_context(name, batch, packed_log_probs(batch, chosen), cp_size)
        loss += part
        assert not grad[batch.loss_mask == 0].any()
        for i, values in zip(indices, unpack(grad, batch, chosen), strict=True):
            assert grads[i] is None, "a sample is in two micro-batches"
            grads[i] = values
    expected, expected_grads = one_by_one(name, samples, counts)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-14)
