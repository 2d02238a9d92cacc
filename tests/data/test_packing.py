from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.data.packing import (
    OPTIONAL_FIELDS,
    context_parallel_shard,
    count_trained,
    pack,
    pack_responses,
    unpack,
)
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.data.turn_spans import Span, with_spans
from megatron_gspo.parallel.context_parallel import zigzag_indices
from megatron_gspo.routing_replay.routes import RouteShape
from tests.support.samples import make_routes, make_sample

PER_TOKEN = (
    "tokens",
    "labels",
    "position_ids",
    "segment_ids",
    "is_fed",
    "loss_mask",
    "response_mask",
    "advantages",
    *OPTIONAL_FIELDS,
)
shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1, max_size=6)


def two_samples():
    first = make_sample(2, 2, seed=0, tokens=np.array([11, 12, 13, 14]))
    second = make_sample(1, 2, seed=1, tokens=np.array([21, 22, 23]), mask=[True, False])
    first.advantages[:] = [1, 2]
    second.advantages[:] = [3, np.nan]
    return [first, second]


def test_text_between_the_turns_of_an_episode_is_no_response():
    turns = with_spans([Span(0, 2, 1.0), Span(3, 5, 0.0)])
    episode = make_sample(2, 5, seed=0, mask=[True, True, False, True, False], metadata=turns)
    batch = pack([episode], num_sequences=1, num_tokens=3)
    assert batch.response_mask.tolist() == [False, True, True, False, True, True, False]
    assert batch.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 0]


def test_by_hand():
    batch = pack(
        two_samples(), sequence_multiple=4, total_multiple=3, num_sequences=5, num_tokens=9
    )
    # second sequence: 3 tokens, padded to 4 by its multiple, to 8 by the total (12 = lcm(4, 3))
    assert batch.tokens.tolist() == [11, 12, 13, 14, 21, 22, 23, 0, 0, 0, 0, 0]
    assert batch.labels.tolist() == [12, 13, 14, 0, 22, 23, 0, 0, 0, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.segment_ids.tolist() == [0] * 4 + [1] * 8
    assert batch.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert batch.response_mask.tolist() == [False, True, True, False, True, True] + [False] * 6
    # The masked NaN is gone.
    assert batch.advantages.tolist() == [0, 1, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 12] and batch.max_seqlen == 8
    assert (batch.num_segments, batch.num_sequences, batch.num_tokens) == (2, 5, 9)
    assert batch.sample_ids == (0, 1)
    assert {batch.tokens.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}
    assert batch.segment_ids.dtype == torch.int64 and batch.cu_seqlens.dtype == torch.int32
    assert {batch.loss_mask.dtype, batch.advantages.dtype, batch.old_log_probs.dtype} == {
        torch.float32
    }


def test_counts_leave_out_sequences_without_a_trained_token():
    samples = [make_sample(2, 3), make_sample(2, 2, mask=[False, False]), make_sample(1, 0)]
    assert count_trained(samples) == (1, 3)


@settings(max_examples=100, deadline=None)
@given(
    shapes=shapes,
    sequence_multiple=st.integers(1, 8),
    total_multiple=st.integers(1, 8),
    data=st.data(),
)
def test_every_position_against_a_naive_loop(shapes, sequence_multiple, total_multiple, data):
    samples = []
    for seed, (prompt, response) in enumerate(shapes):
        mask = data.draw(st.lists(st.booleans(), min_size=response, max_size=response))
        samples.append(make_sample(prompt, response, seed=seed, mask=mask))
    batch = pack(
        samples,
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
        num_sequences=1,
        num_tokens=1,
    )
    bounds = batch.cu_seqlens.tolist()
    assert len(batch.tokens) == bounds[-1] and bounds[-1] % total_multiple == 0
    assert all(
        (end - start) % sequence_multiple == 0
        for start, end in zip(bounds, bounds[1:], strict=False)
    )
    assert batch.max_seqlen == max(
        end - start for start, end in zip(bounds, bounds[1:], strict=False)
    )
    for s, sample in enumerate(samples):
        for t in range(bounds[s + 1] - bounds[s]):
            at = bounds[s] + t
            j = t + 1 - sample.prompt_length
            trained = 0 <= j < sample.response_length and bool(sample.loss_mask[j])
            assert batch.tokens[at] == (sample.tokens[t] if t < sample.length else 0)
            assert batch.labels[at] == (sample.tokens[t + 1] if t + 1 < sample.length else 0)
            assert (batch.position_ids[at], batch.segment_ids[at]) == (t, s)
            assert batch.loss_mask[at] == float(trained)
            assert batch.response_mask[at] == (0 <= j < sample.response_length)
            for name in ("advantages", *OPTIONAL_FIELDS):
                assert getattr(batch, name)[at] == (getattr(sample, name)[j] if trained else 0)


def of_rows(*lengths: int, prompt_length: int, seed: int, shape: RouteShape) -> Sample:
    """A sample of these rows, trained wherever it can be, and its routes."""
    total = sum(lengths)
    mask = np.ones(total - prompt_length, dtype=bool)
    mask[np.cumsum(lengths)[:-1] - prompt_length] = False
    return make_sample(
        prompt_length,
        total - prompt_length,
        seed=seed,
        mask=mask,
        row_lengths=np.array(lengths),
        routed_experts=make_routes(total - 1, shape.layers, shape.k, shape.num_experts, seed=seed),
    )


def row_samples(sample: Sample) -> list[Sample]:
    """Each row of a sample as a sample of its own."""
    ends = np.cumsum(sample.row_lengths)
    samples = []
    for start, end in zip(ends - sample.row_lengths, ends, strict=True):
        prompt_length = sample.prompt_length if start == 0 else 1
        response = slice(start + prompt_length - sample.prompt_length, end - sample.prompt_length)
        per_token = {
            name: getattr(sample, name)[response] for name in (*OPTIONAL_FIELDS, "advantages")
        }
        samples.append(
            replace(
                sample,
                tokens=sample.tokens[start:end],
                prompt_length=prompt_length,
                loss_mask=sample.loss_mask[response],
                routed_experts=sample.routed_experts[start : end - 1],
                row_lengths=None,
                **per_token,
            )
        )
    return samples


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_rows_of_a_sample_are_packed_as_samples_of_their_own_but_of_one_segment(multiple):
    shape = RouteShape(2, 2, 8)
    run = of_rows(5, 3, 6, prompt_length=2, seed=0, shape=shape)
    single = of_rows(4, prompt_length=1, seed=1, shape=shape)
    run.check()
    counts = {"num_sequences": 2, "num_tokens": 9}
    packed = pack([run, single], sequence_multiple=multiple, routes=shape, **counts)
    apart = pack([*row_samples(run), single], sequence_multiple=multiple, routes=shape, **counts)
    for name in (*PER_TOKEN, "cu_seqlens", "routed_experts", "is_fed"):
        if name != "segment_ids":
            assert torch.equal(getattr(packed, name), getattr(apart, name)), name
    assert torch.equal(packed.segment_ids, torch.tensor([0, 0, 0, 1])[apart.segment_ids])
    assert (packed.num_segments, packed.max_seqlen) == (2, apart.max_seqlen)
    assert packed.sequences == ((0, 0), (1, 0))
    responses = unpack(packed.labels, packed, [run, single])
    firsts = [3, 6]
    for response, sample in zip(responses, [run, single], strict=True):
        expected = sample.response_ids.copy()
        if sample is run:
            expected[firsts] = 0  # nothing predicts the first token of a row
        assert response.tolist() == expected.tolist()


@settings(max_examples=100, deadline=None)
@given(shapes=shapes, sequence_multiple=st.integers(1, 8))
def test_unpack_is_the_inverse_of_pack(shapes, sequence_multiple):
    samples = [make_sample(prompt, response, seed=i) for i, (prompt, response) in enumerate(shapes)]
    batch = pack(samples, sequence_multiple=sequence_multiple, num_sequences=1, num_tokens=1)
    for sample, labels in zip(samples, unpack(batch.labels, batch, samples), strict=True):
        assert labels.tolist() == sample.response_ids.tolist()
    for sample, values in zip(samples, unpack(batch.ref_log_probs, batch, samples), strict=True):
        assert values.dtype == np.float32 and values.tolist() == sample.ref_log_probs.tolist()


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, cp_size=st.integers(1, 4), extra=st.integers(1, 2))
def test_shards_partition_the_tokens(shapes, cp_size, extra):
    samples = [make_sample(prompt, response, seed=i) for i, (prompt, response) in enumerate(shapes)]
    batch = pack(samples, sequence_multiple=2 * cp_size * extra, num_sequences=1, num_tokens=1)
    shards = [context_parallel_shard(batch, rank, cp_size) for rank in range(cp_size)]
    assert {len(shard.tokens) for shard in shards} == {len(batch.tokens) // cp_size}
    owned = torch.cat([zigzag_indices(batch.cu_seqlens, rank, cp_size) for rank in range(cp_size)])
    assert sorted(owned.tolist()) == list(range(len(batch.tokens)))
    for name in PER_TOKEN:
        together = torch.empty_like(getattr(batch, name))
        together[owned] = torch.cat([getattr(shard, name) for shard in shards])
        assert torch.equal(together, getattr(batch, name)), name
    for shard in shards:
        assert torch.equal(shard.cu_seqlens, batch.cu_seqlens)
        assert (shard.max_seqlen, shard.sample_ids) == (batch.max_seqlen, batch.sample_ids)


def test_shard_refuses_uneven_sequences_and_shards():
    batch = pack([make_sample(3, 3)], num_sequences=1, num_tokens=3)
    with pytest.raises(ValueError, match="sequence_multiple=4"):
        context_parallel_shard(batch, 0, 2)
    batch = pack([make_sample(3, 5)], sequence_multiple=4, num_sequences=1, num_tokens=5)
    with pytest.raises(ValueError, match="holds 4 of its 8 positions"):
        context_parallel_shard(context_parallel_shard(batch, 0, 2), 0, 2)
    with pytest.raises(ValueError, match=r"shape \[4\]; it must be \[8\]"):
        unpack(context_parallel_shard(batch, 0, 2).tokens, batch, [make_sample(3, 5)])


def test_dummy_batch_of_no_samples():
    batch = pack([], sequence_multiple=4, total_multiple=6, num_sequences=3, num_tokens=7)
    assert batch.tokens.tolist() == [0] * 12 and batch.cu_seqlens.tolist() == [0, 12]
    assert not batch.loss_mask.any()
    assert not batch.response_mask.any()
    assert not batch.advantages.any()
    assert (batch.num_segments, batch.max_seqlen, batch.sample_ids) == (1, 12, ())
    assert (batch.num_sequences, batch.num_tokens) == (3, 7)
    assert all(torch.equal(getattr(batch, name), torch.zeros(12)) for name in OPTIONAL_FIELDS)
    assert unpack(batch.loss_mask, batch, []) == []
    assert len(context_parallel_shard(batch, 1, 2).tokens) == 6
    only = pack([], num_sequences=3, num_tokens=7, optional=["old_log_probs"])
    assert only.old_log_probs is not None
    assert only.ref_log_probs is None
    assert only.rollout_log_probs is None


def test_fields_are_carried_by_all_samples_or_by_none():
    bare = [make_sample(2, 2, log_probs=False), make_sample(1, 1, log_probs=False)]
    batch = pack(bare, num_sequences=2, num_tokens=3)
    assert batch.old_log_probs is None and batch.advantages.tolist() == [0] * 6
    full = make_sample(2, 2)
    assert pack([full], num_sequences=1, num_tokens=2, optional=()).old_log_probs is None
    with pytest.raises(ValueError, match="log_probs is missing from 1 of 2 samples"):
        pack([full, bare[0]], num_sequences=2, num_tokens=4)
    with pytest.raises(ValueError, match="ref_log_probs is missing from 2 of 2"):
        pack(bare, num_sequences=2, num_tokens=3, optional=["ref_log_probs"])
    full.old_log_probs = full.old_log_probs[:1]
    with pytest.raises(ValueError, match="sample 0/0: a per-token field has shape"):
        pack([full], num_sequences=1, num_tokens=2)


def routed(prompt, response, shape, seed=0, missing=None):
    ids = make_routes(prompt + response - 1, shape.layers, shape.k, shape.num_experts, seed=seed)
    return make_sample(prompt, response, seed=seed, routed_experts=ids, missing_routes=missing)


def test_routes_by_hand():
    shape = RouteShape(layers=2, k=2, num_experts=5)
    first = make_sample(
        2, 1, routed_experts=np.array([[[4, 0], [1, 3]], [[2, 1], [0, 4]]], np.uint8)
    )
    second = make_sample(1, 1, routed_experts=np.array([[[3, 4], [3, 0]]], np.uint8))
    batch = pack([first, second], sequence_multiple=4, num_sequences=2, num_tokens=2, routes=shape)
    # rows that no sample has, by their position: 1 -> (2, 3), 2 -> (4, 5), 3 -> (6, 7), modulo 5
    assert batch.routed_experts.tolist() == [
        [[4, 0], [1, 3]],
        [[2, 1], [0, 4]],
        [[4, 0], [4, 0]],
        [[1, 2], [1, 2]],
        [[3, 4], [3, 0]],
        [[2, 3], [2, 3]],
        [[4, 0], [4, 0]],
        [[1, 2], [1, 2]],
    ]
    assert batch.routed_experts.dtype == torch.uint8 and batch.missing_routes is None
    for held in ((1,), ()):  # on a pipeline stage
        samples_of_stage = [
            replace(sample, routed_experts=sample.routed_experts[:, list(held)])
            for sample in (first, second)
        ]
        batch_of_stage = pack(
            samples_of_stage,
            sequence_multiple=4,
            num_sequences=2,
            num_tokens=2,
            routes=replace(shape, held=held),
        )
        assert (
            batch_of_stage.routed_experts.tolist() == batch.routed_experts[:, list(held)].tolist()
        )


@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes,
    multiple=st.integers(1, 8),
    sizes=st.sampled_from([(1, 1, 1), (2, 2, 5), (3, 4, 256), (1, 4, 257)]),
    data=st.data(),
)
def test_routes_of_every_position_against_a_naive_loop(shapes, multiple, sizes, data):
    shape = RouteShape(*sizes)
    samples = []
    for seed, (prompt, response) in enumerate(shapes):
        num_routes = prompt + response - 1
        drawn = data.draw(
            st.none() | st.lists(st.booleans(), min_size=num_routes, max_size=num_routes)
        )
        samples.append(
            routed(prompt, response, shape, seed, None if drawn is None else np.array(drawn, bool))
        )
    batch = pack(samples, sequence_multiple=multiple, num_sequences=1, num_tokens=1, routes=shape)
    ids = batch.routed_experts.numpy()
    assert ids.dtype == shape.dtype and ids.shape == (len(batch.tokens), shape.layers, shape.k)
    bounds = batch.cu_seqlens.tolist()
    missing = 0
    for s, sample in enumerate(samples):
        for t in range(bounds[s + 1] - bounds[s]):
            real = t < sample.length - 1
            is_missing = (
                real and sample.missing_routes is not None and bool(sample.missing_routes[t])
            )
            missing += is_missing
            assert (
                batch.missing_routes is not None and bool(batch.missing_routes[bounds[s] + t])
            ) == is_missing
            for layer in range(shape.layers):
                spread = [(t * shape.k + j) % shape.num_experts for j in range(shape.k)]
                known = real and not is_missing
                wanted = sample.routed_experts[t, layer].tolist() if known else spread
                assert ids[bounds[s] + t, layer].tolist() == wanted
    assert (batch.missing_routes is None) == (missing == 0)


@pytest.mark.parametrize("num_experts", [8, 300])
def test_a_dummy_batch_carries_routes_and_shards_and_moves(num_experts):
    shape = RouteShape(layers=2, k=3, num_experts=num_experts)
    dummy = pack(
        [], sequence_multiple=4, total_multiple=6, num_sequences=1, num_tokens=1, routes=shape
    )
    assert dummy.routed_experts.dtype == shape.torch_dtype and dummy.missing_routes is None
    for t in range(12):
        wanted = [(3 * t + j) % num_experts for j in range(3)]
        assert dummy.routed_experts[t].tolist() == [wanted, wanted]
    assert pack([], num_sequences=1, num_tokens=1).routed_experts is None
    missing = np.array([False, True, False])
    sample = routed(2, 2, shape, missing=missing)
    batch = pack([sample], sequence_multiple=4, num_sequences=1, num_tokens=2, routes=shape)
    for rank, positions in ((0, [0, 3]), (1, [1, 2])):
        shard = context_parallel_shard(batch, rank, 2)
        assert shard.routed_experts.tolist() == batch.routed_experts[positions].tolist()
        assert shard.missing_routes.tolist() == batch.missing_routes[positions].tolist()
        assert shard.routed_experts.dtype == shape.torch_dtype
    moved = batch.to("meta")
    assert moved.routed_experts.device.type == moved.missing_routes.device.type == "meta"
    assert moved.routed_experts.dtype == shape.torch_dtype


def test_routes_are_carried_only_where_asked_for():
    shape = RouteShape(2, 2, 8)
    assert pack([routed(2, 2, shape)], num_sequences=1, num_tokens=2).routed_experts is None
    for sample, message in (
        (make_sample(2, 2), "sample 0/0: routed_experts is missing; give routes to all samples"),
        (
            routed(2, 2, RouteShape(3, 2, 8)),
            r"0/0: routed_experts has shape \[3, 3, 2\]; it must be \[3, 2, 2\]",
        ),
        (
            make_sample(2, 2, routed_experts=np.zeros((2, 2, 2), np.uint8)),
            "has 2 rows for 4 tokens; give 3",
        ),
        (
            make_sample(2, 2, routed_experts=np.full((3, 2, 2), 256, np.uint16)),
            "has the expert 256; the model has",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            pack([sample], num_sequences=1, num_tokens=2, routes=shape)
    wide = make_sample(2, 2, routed_experts=make_routes(3, 2, 2, 8).astype(np.uint16))
    batch = pack([wide], num_sequences=1, num_tokens=2, routes=shape)
    assert batch.routed_experts.dtype == torch.uint8
    assert batch.routed_experts[:3].tolist() == wide.routed_experts.tolist()


def test_columns_of_a_teacher_are_packed_as_those_of_one_number():
    """One number of each row of [R, 3] is the advantage; also in a shard of context parallelism."""
    samples = [make_sample(3, 5, seed=4, mask=[True, False, True, True, True]), *two_samples()]
    batch = TrainingBatch.of(samples)
    advantages = batch.responses["advantages"]
    log_probs = np.stack([advantages, 2 * advantages, advantages - 1], axis=1)
    ids = np.arange(3 * len(advantages), dtype=np.int32).reshape(-1, 3)
    batch = batch.with_column("teacher_top_log_probs", log_probs)
    batch = batch.with_column("teacher_top_ids", ids)
    packed = pack_responses(
        batch,
        range(3),
        num_sequences=3,
        num_tokens=7,
        sequence_multiple=4,
        total_multiple=4,
        optional=("teacher_top_ids", "teacher_top_log_probs"),
        routes=None,
    )
    trained = packed.loss_mask > 0
    assert packed.teacher_top_ids.dtype == torch.int32
    assert torch.equal(packed.teacher_top_log_probs[:, 0], packed.advantages)
    assert torch.equal(packed.teacher_top_log_probs[trained][:, 2], packed.advantages[trained] - 1)
    assert not packed.teacher_top_ids[~trained].any()
    expected = ids[batch.responses["loss_mask"]]
    assert torch.equal(packed.teacher_top_ids[trained], torch.from_numpy(expected))
    shard = context_parallel_shard(packed, 1, 2)
    assert torch.equal(shard.teacher_top_log_probs[:, 0], shard.advantages)


def test_the_ids_that_could_be_drawn_are_packed_with_their_token():
    """The i-th of a token's ids is 10 * token + i; also in a shard of context parallelism."""
    samples = [make_sample(3, 5, seed=4, mask=[True, False, True, True, True]), *two_samples()]
    for number, sample in enumerate(samples):
        lengths = 1 + (np.arange(sample.response_length) + number) % 3
        sample.support_lengths = lengths.astype(np.int32)
        ids = [
            10 * token + np.arange(n) for token, n in zip(sample.response_ids, lengths, strict=True)
        ]
        sample.support_ids = np.concatenate(ids).astype(np.int32)
    batch = TrainingBatch.of(samples).select([2, 0, 1]).select([1, 2, 0])
    packed = pack_responses(
        batch,
        [0, 2],
        num_sequences=2,
        num_tokens=6,
        sequence_multiple=4,
        total_multiple=4,
        optional=(),
        routes=None,
    )
    assert packed.support.dtype == torch.int32 and packed.support.shape[1] == 3
    expected = [
        [10 * token + i for i in range(n)]
        for sample in (samples[0], samples[2])
        for token, n in zip(sample.response_ids.tolist(), sample.support_lengths, strict=True)
    ]
    labels = packed.labels[packed.response_mask].tolist()
    found = [[i for i in row if i >= 0] for row in packed.support[packed.response_mask].tolist()]
    assert found == expected and [row[0] // 10 for row in found] == labels
    assert (packed.support[~packed.response_mask] == -1).all()
    shard = context_parallel_shard(packed, 1, 2)
    first = shard.support[shard.response_mask][:, 0]
    assert torch.equal(first // 10, shard.labels[shard.response_mask].int())
