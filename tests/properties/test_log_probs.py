"""Log-probabilities do not depend on tiles, on padded rows or on how ranks share the vocabulary."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megatron_gspo.parallel.vocabulary_tiles import tile_elements, tile_shape
from tests.parallel.calls import call_log_probs
from tests.support.distributed import run_distributed

cases = st.fixed_dictionaries(
    {
        "tokens": st.integers(0, 9),
        "vocabulary": st.integers(1, 24),
        "padding": st.integers(0, 24),
        "width": st.integers(1, 5),
        "temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "size": st.sampled_from([0.0, 1.0, 50.0]),
        "seed": st.integers(0, 2**31),
        "chunk_bytes": st.sampled_from([1, 200, 600, 2_000, 2**20]),
        "with_entropy": st.booleans(),
    }
)


def inputs(case, rows):
    """hidden, weight of `rows` (padding ones large: a leak shows), labels, gradients of both results; float64."""
    g = torch.Generator().manual_seed(case["seed"])
    hidden = case["size"] * torch.randn(case["tokens"], case["width"], generator=g, dtype=torch.float64)
    weight = torch.randn(rows, case["width"], generator=g, dtype=torch.float64)
    weight[case["vocabulary"] :] = 9.0
    labels = torch.randint(0, case["vocabulary"], (case["tokens"],), generator=g)
    return hidden, weight, labels, torch.randn(2, case["tokens"], generator=g, dtype=torch.float64)


def loss_of(log_probs, entropy, grads):
    loss = (log_probs * grads[0]).sum()
    return loss if entropy is None else loss + (entropy * grads[1]).sum()


def naive(case, hidden, weight, labels, grads):
    """Values and gradients from the whole logits."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = hidden @ weight[: case["vocabulary"]].T / case["temperature"]
    everything = logits.log_softmax(-1)
    log_probs = everything.gather(1, labels[:, None]).squeeze(1)
    entropy = -(everything.exp() * everything).sum(-1)
    loss_of(log_probs, entropy if case["with_entropy"] else None, grads).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def check(case, group=None, rank=0, size=1, sequence_parallel=False):
    """Against the naive values and gradients, this rank's part."""
    rows = -(-(case["vocabulary"] + case["padding"]) // size) * size
    if sequence_parallel:
        case = case | {"tokens": case["tokens"] * size}
    hidden, weight, labels, grads = inputs(case, rows)
    log_probs, entropy, grad_hidden, grad_weight = naive(case, hidden, weight, labels, grads)
    if sequence_parallel:
        hidden, grad_hidden = (x.chunk(size)[rank] if len(x) else x for x in (hidden, grad_hidden))
    mine, shard = hidden.clone().requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_()
    names = ("temperature", "chunk_bytes", "with_entropy")
    got, got_entropy = call_log_probs(
        mine,
        shard,
        labels,
        tp_group=group,
        sequence_parallel=sequence_parallel,
        vocab_size=case["vocabulary"],
        **{name: case[name] for name in names},
    )
    loss_of(got, got_entropy, grads).backward()
    close(got, log_probs)
    if case["with_entropy"]:
        close(got_entropy, entropy)
    else:
        assert got_entropy is None
    close(mine.grad, grad_hidden)
    close(shard.grad, grad_weight.chunk(size)[rank])


def close(got, expected):
    """To the rounding of the largest numbers: logits reach a few hundred."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11 * max(scale, 1.0))


@given(case=cases)
def test_any_tiles_and_padding(case):
    check(case)


@given(case=cases)
def test_values_are_the_same_without_gradient(case):
    hidden, weight, labels, _ = inputs(case, case["vocabulary"] + case["padding"])
    options = {name: case[name] for name in ("temperature", "chunk_bytes", "with_entropy")}
    options["vocab_size"] = case["vocabulary"]
    recorded = call_log_probs(hidden.requires_grad_(), weight, labels, **options)
    with torch.no_grad():
        plain = call_log_probs(hidden, weight, labels, **options)
    for a, b in zip(recorded, plain, strict=True):
        if a is not None:
            close(a.detach(), b)


@given(
    tokens=st.integers(1, 5000),
    rows=st.integers(1, 200_000),
    width=st.integers(1, 300),
    budget=st.integers(1, 10**8),
    preferred=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
)
def test_a_tile_fits_and_is_not_needlessly_small(tokens, rows, width, budget, preferred):
    chunk, vocabulary = tile_shape(tokens, rows, width, budget, preferred)
    assert 1 <= chunk <= min(tokens, preferred[0]) and 1 <= vocabulary <= rows
    assert chunk * vocabulary <= max(preferred[0] * preferred[1], chunk)
    elements = tile_elements(chunk, vocabulary, width)
    assert elements <= budget or chunk * vocabulary == 1
    whole = (min(tokens, preferred[0]), min(rows, preferred[0] * preferred[1] // min(tokens, preferred[0])))
    if tile_elements(whole[0], max(whole[1], 1), width) <= budget:
        assert (chunk, vocabulary) == (whole[0], max(whole[1], 1))


def _over_ranks(rank, world_size, number, examples):
    """The same examples on every rank: the seed decides them."""
    calls = []
    profile = settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    @seed(number)
    @profile
    @given(case=cases, sequence_parallel=st.booleans())
    def over_all(case, sequence_parallel):
        calls.append(case["seed"])
        check(case, dist.group.WORLD, rank, world_size, sequence_parallel)

    over_all()
    return calls


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_share_of_the_vocabulary(world_size):
    """Ranks whose rows are all padding occur, and tokens that no rank has."""
    examples = min(settings().max_examples, 200)
    first, *others = run_distributed(_over_ranks, world_size, 0, examples)
    assert len(first) >= examples // 2 and all(other == first for other in others)
