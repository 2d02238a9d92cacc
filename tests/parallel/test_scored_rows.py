"""Scored rows against naive indexing, and log-probs of scored positions alone, with and without
tensor parallelism.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megatron_gspo.parallel.scored_rows import ScoredRows
from tests.support.distributed import collectives_so_far, run_distributed

from .calls import call_log_probs
from .test_log_probs import MANY_TILES, ONE_TILE, assert_same, inputs, reference

TOKENS = 24
MASKS = {  # of TOKENS positions; the ranks' shares of them are equal, unequal, or none for some rank
    "all": torch.ones(TOKENS),
    "none": torch.zeros(TOKENS),
    "last": (torch.arange(TOKENS) == TOKENS - 1).float(),
    "second half": (torch.arange(TOKENS) >= TOKENS // 2).float(),
    "scattered": torch.tensor([0, 1, 1, 0, 0, 1] + [0] * 6 + [1] * 6 + [0, 0, 1, 0, 0, 0]),
}


@settings(max_examples=200, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=12, max_size=12), size=st.sampled_from([1, 2, 3, 4]))
def test_rows_of_every_rank_against_naive_indexing(mask, size):
    hidden = torch.arange(1.0, 25.0).view(12, 2)
    mask = torch.tensor(mask)
    ranks = [ScoredRows.of(mask, rank, size) for rank in range(size)]
    shares = hidden.chunk(size)
    gathered = torch.cat(
        [rows.select_own(share) for rows, share in zip(ranks, shares, strict=True)]
    )
    assert len(gathered) == size * max(int(own_mask.sum()) for own_mask in mask.chunk(size)), (
        "no more than the largest share"
    )
    for rows, share, own_mask in zip(ranks, shares, mask.chunk(size), strict=True):
        assert rows.positions.tolist() == mask.nonzero().flatten().tolist()
        assert torch.equal(rows.select_gathered(gathered), hidden[mask])
        assert (rows.gathered is None) == (size == 1)
        back = rows.spread_own(rows.select_own(share), len(share))
        assert torch.equal(back, share * own_mask[:, None])
    everywhere = ranks[0].spread_gathered(hidden[mask], size)
    assert torch.equal(everywhere, gathered), "padding is 0"


def ours(hidden, weight, labels, grad_log_probs, grad_entropy, **options):
    """log_probs, entropy, hidden.grad, weight.grad of ``call_log_probs``."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    log_probs, entropy = call_log_probs(hidden, weight, labels, with_entropy=True, **options)
    ((log_probs * grad_log_probs).sum() + (entropy * grad_entropy).sum()).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def expected_of(case, mask, **options):
    """Of the reference on all positions: the gradients of the scored ones, and their values
    with 0 elsewhere.
    """
    hidden, weight, labels, *grads = case
    mask_of_labels = mask.view(len(mask), *[1] * (labels.dim() - 1))
    log_probs, entropy, *gradients = reference(
        hidden, weight, labels, grads[0] * mask_of_labels, grads[1] * mask, **options
    )
    return log_probs * mask_of_labels, entropy * mask, *gradients


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [(), (4,)])
def test_scored_positions_have_their_log_probs_and_the_others_nothing(
    name, chunk_bytes, dtype, count
):
    case = inputs(TOKENS, 101, 12, padded=128, count=count)
    mask = MASKS[name]
    options = {"temperature": 0.6, "vocab_size": 101}
    hidden, weight, labels, *grads = case
    elsewhere = mask == 0
    hidden = hidden.clone()
    labels = labels.clone().to(dtype)
    hidden[elsewhere], labels[elsewhere] = torch.nan, 1000  # never read
    actual = ours(
        hidden,
        weight,
        labels,
        *grads,
        scored=ScoredRows.of(mask),
        chunk_bytes=chunk_bytes,
        **options,
    )
    if mask.any():
        assert_same(actual, expected_of(case, mask, **options))
    assert not any(value[elsewhere].any() for value in actual[:3])
    assert mask.any() or not actual[3].any()


def test_products_and_saved_rows_are_those_of_the_scored_positions():
    """A quarter of the positions: a quarter of the work and of the memory that waits for the
    backward.
    """
    work = []
    saved = []
    for scored in (None, ScoredRows.of(torch.arange(64) % 4 == 1)):
        hidden, weight, labels, *_ = inputs(64, 60, 8)
        kept = []
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda x, kept=kept: kept.append(x.shape) or x, lambda x: x
            ),
            FlopCounterMode(display=False) as counter,
        ):
            live = hidden.requires_grad_() * 1.0
            kept.clear()
            log_probs, _ = call_log_probs(
                live, weight.requires_grad_(), labels, scored=scored, chunk_bytes=MANY_TILES
            )
            log_probs.sum().backward()
        work.append(counter.get_total_flops())
        saved.append(kept[0])
    assert work[0] == 4 * work[1] > 0
    assert saved == [(64, 8), (16, 8)]


def _on_shards(rank, world_size):
    """Every mask, on all ranks of one group; the bytes that went through its all-gathers of
    hidden states.
    """
    group = dist.group.WORLD
    cases = 0
    for (name, mask), sequence_parallel in itertools.product(MASKS.items(), (False, True)):
        for dtype, values, grads, count in (
            (torch.float32, 1e-5, 1e-5, ()),
            (torch.bfloat16, 2e-5, 2**-8, ()),
            (torch.float32, 1e-5, 1e-5, (4,)),
        ):
            case = inputs(TOKENS, 85, 12, padded=120, dtype=dtype, count=count)
            hidden, weight, labels, *gradients = case
            rank_and_size = (rank, world_size) if sequence_parallel else (0, 1)
            hidden = hidden.chunk(world_size)[rank] if sequence_parallel else hidden
            before = collectives_so_far()
            shard = weight.chunk(world_size)[rank]
            options = dict(
                tp_group=group,
                temperature=0.8,
                vocab_size=85,
                sequence_parallel=sequence_parallel,
                chunk_bytes=MANY_TILES,
                scored=ScoredRows.of(mask, *rank_and_size),
            )
            actual = ours(hidden, shard, labels, *gradients, **options)
            with torch.no_grad():
                assert torch.equal(
                    call_log_probs(hidden, shard, labels, **options)[0].double(), actual[0].double()
                )
            assert collectives_so_far() - before == (6 if sequence_parallel else 3), (
                f"{name}: ranks would wait"
            )
            log_probs, entropy, grad_hidden, grad_weight = expected_of(
                case, mask, temperature=0.8, vocab_size=85
            )
            grad_hidden = grad_hidden.chunk(world_size)[rank] if sequence_parallel else grad_hidden
            for value, wanted, scale in zip(
                actual,
                (log_probs, entropy, grad_hidden, grad_weight.chunk(world_size)[rank]),
                (
                    values,
                    values,
                    *(grads * float(whole.abs().max()) for whole in (grad_hidden, grad_weight)),
                ),
                strict=True,
            ):
                torch.testing.assert_close(value.double(), wanted, rtol=0, atol=scale + 1e-12)
            cases += 1
    return cases


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_score_the_same_positions(size):
    assert run_distributed(_on_shards, size) == [6 * len(MASKS)] * size


def test_everything_goes_to_the_device_of_the_rows():
    rows = ScoredRows.of(torch.tensor([0.0, 1, 1, 0]), 0, 2).to("meta")
    assert {rows.positions.device.type, rows.own.device.type, rows.gathered.device.type} == {"meta"}
    hidden, weight = (torch.empty(n, 4, device="meta", requires_grad=True) for n in (4, 9))
    labels = torch.empty(4, dtype=torch.long, device="meta")
    scored = ScoredRows.of(torch.tensor([0.0, 1, 1, 0])).to("meta")
    log_probs, entropy = call_log_probs(hidden, weight, labels, with_entropy=True, scored=scored)
    (log_probs.sum() + entropy.sum()).backward()
    assert {x.device.type for x in (log_probs, entropy, hidden.grad, weight.grad)} == {"meta"}
