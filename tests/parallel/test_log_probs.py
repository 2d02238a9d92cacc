"""Log-probabilities and entropy from hidden states against torch.log_softmax in float64."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_gspo.parallel.log_probs import CHUNK_BYTES, LogProbOptions, top_ids_from_hidden
from megatron_gspo.parallel.scored_rows import ScoredRows
from megatron_gspo.parallel.vocabulary_tiles import TILE
from tests.support.distributed import collectives_so_far, run_distributed

from .calls import call_log_probs

# chunk_bytes: the logits are kept; tiles of a few tokens and rows; the default
ONE_TILE = 2**30
MANY_TILES = 2_000
DEFAULT = None


def inputs(
    tokens, vocabulary, width, *, padded=None, dtype=torch.float32, seed=0, size=1.0, count=()
):
    """hidden, weight, labels, gradients of both results.

    Padding rows are large, so that a leak shows. count: of labels of a token, of which the first
    two are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator) * size
    weight = torch.randn(padded or vocabulary, width, generator=generator)
    weight[vocabulary:] = 7.0
    labels = torch.randint(0, vocabulary, (tokens, *count), generator=generator)
    if count:
        labels[:, 1] = labels[:, 0]
    grad_entropy = torch.randn(tokens, generator=generator)
    grad_log_probs = torch.randn(tokens, *count, generator=generator)
    return hidden.to(dtype), weight.to(dtype), labels, grad_log_probs, grad_entropy


def reference(
    hidden, weight, labels, grad_log_probs, grad_entropy, *, temperature=1.0, vocab_size=None
):
    """log_probs, entropy, hidden.grad, weight.grad in float64, from the whole logits."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight[:vocab_size].T / temperature
    all_log_probs = logits.log_softmax(-1)
    log_probs = all_log_probs.gather(1, labels.view(len(labels), -1)).view(labels.shape)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    loss = (log_probs * grad_log_probs).sum()
    if grad_entropy is not None:
        loss = loss + (entropy * grad_entropy).sum()
    loss.backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def ours(hidden, weight, labels, grad_log_probs, grad_entropy, **options):
    """The same four from the function under test, in their own dtypes."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    log_probs, entropy = call_log_probs(hidden, weight, labels, with_entropy=True, **options)
    loss = (log_probs * grad_log_probs).sum()
    if grad_entropy is not None:
        loss = loss + (entropy * grad_entropy).sum()
    loss.backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_same(actual, expected, *, values=1e-5, grads=1e-5):
    """Absolute tolerance on the values; on gradients relative to the largest entry."""
    names = ("log_probs", "entropy", "hidden.grad", "weight.grad")
    for name, a, b in zip(names, actual, expected, strict=True):
        error = (a.double() - b).abs().max().item()
        limit = grads * b.abs().max().item() if name.endswith("grad") else values
        assert error <= limit, f"{name}: off by {error:.2e}, allowed {limit:.2e}"


def test_worked_case():
    """Logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8."""
    weight = torch.tensor([1.0, 2.0, 5.0]).log()[:, None]
    log_probs, entropy = call_log_probs(
        torch.ones(3, 1), weight, torch.arange(3), with_entropy=True, chunk_bytes=1
    )
    probabilities = [1 / 8, 2 / 8, 5 / 8]
    assert log_probs.tolist() == pytest.approx([math.log(p) for p in probabilities], abs=1e-6)
    assert entropy.tolist() == pytest.approx(
        [-sum(p * math.log(p) for p in probabilities)] * 3, abs=1e-6
    )


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES, DEFAULT])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padded", [None, 128])
@pytest.mark.parametrize("count", [(), (6,), (101,)])
def test_matches_log_softmax(chunk_bytes, temperature, padded, count):
    case = inputs(37, 101, 12, padded=padded, count=count)
    options = {"temperature": temperature, "vocab_size": 101}
    actual = ours(*case, **options, chunk_bytes=chunk_bytes)
    assert_same(actual, reference(*case, **options))
    assert actual[0].dtype == actual[1].dtype == torch.float32
    assert not actual[3][101:].any()


@pytest.mark.parametrize("chunk_bytes", [8 * TILE["cpu"][0] * TILE["cpu"][1], ONE_TILE])
def test_matches_with_several_full_tiles_of_the_default_size(chunk_bytes):
    tokens = TILE["cpu"][0] + 200
    vocabulary = 4 * TILE["cpu"][1] + 77
    case = inputs(tokens, vocabulary, 8)
    assert_same(ours(*case, chunk_bytes=chunk_bytes), reference(*case))


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES])
def test_bfloat16_inputs_give_float32_values(chunk_bytes):
    """The reference multiplies the same bfloat16 numbers exactly, so only float32 rounding may show
    in the values (a bfloat16 logit would be off by up to 0.03 here). Gradients return in bfloat16:
    half a unit of 8 bits, 2**-9.
    """
    case = inputs(40, 300, 32, dtype=torch.bfloat16)
    actual = ours(*case, chunk_bytes=chunk_bytes)
    assert_same(actual, reference(*case), values=2e-5, grads=2**-8)
    assert [x.dtype for x in actual] == [torch.float32] * 2 + [torch.bfloat16] * 2


def test_weight_gradient_of_bfloat16_is_summed_in_float32():
    """4,096 equal contributions: a bfloat16 sum would stop growing at 256 of them."""
    tokens = 4096
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    call_log_probs(hidden, weight, labels, chunk_bytes=MANY_TILES)[0].sum().backward()
    assert weight.grad.flatten().tolist() == [tokens / 2, -tokens / 2]


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES])
def test_logits_of_ten_thousand(chunk_bytes):
    """A float32 logit of 1e4 is known to 1e-3, hence the tolerance on values; nothing may
    overflow.
    """
    case = inputs(30, 50, 4, size=5e3)
    assert (case[0] @ case[1].T).abs().max() > 1e4
    actual = ours(*case, chunk_bytes=chunk_bytes)
    assert all(x.isfinite().all() for x in actual)
    assert_same(actual, reference(*case), values=5e-3, grads=1e-3)


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES])
def test_uniform_logits_at_an_offset(chunk_bytes):
    """All logits 3e4: the entropy is ln V exactly; computed as logsumexp - E[x] it would be off
    by 1e-3.
    """
    hidden = torch.full((3, 1), 3e4)
    weight = torch.ones(64, 1)
    log_probs, entropy = call_log_probs(
        hidden, weight, torch.tensor([0, 1, 63]), with_entropy=True, chunk_bytes=chunk_bytes
    )
    assert entropy.tolist() == pytest.approx([math.log(64)] * 3, abs=1e-6)
    assert log_probs.tolist() == pytest.approx([-math.log(64)] * 3, abs=1e-6)


def test_entropy_without_gradient_leaves_the_log_prob_gradient_alone():
    *case, _ = inputs(20, 60, 8)
    with_entropy = ours(*case, None, chunk_bytes=MANY_TILES)
    hidden, weight = (x.clone().requires_grad_() for x in case[:2])
    log_probs, entropy = call_log_probs(hidden, weight, case[2], chunk_bytes=MANY_TILES)
    (log_probs * case[3]).sum().backward()
    assert entropy is None
    assert torch.equal(with_entropy[2], hidden.grad) and torch.equal(with_entropy[3], weight.grad)
    assert_same(with_entropy, reference(*case, None))


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES])
def test_a_second_backward_gives_the_same(chunk_bytes):
    hidden, weight, labels, grad, _ = inputs(20, 60, 8)
    log_probs, _ = call_log_probs(hidden.requires_grad_(), weight, labels, chunk_bytes=chunk_bytes)
    loss = (log_probs * grad).sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])


def test_frozen_weight_or_hidden_gets_no_gradient():
    hidden, weight, labels, grad, _ = inputs(20, 60, 8)
    _, _, grad_hidden, grad_weight = ours(hidden, weight, labels, grad, None)
    live = hidden.clone().requires_grad_()
    (call_log_probs(live, weight, labels)[0] * grad).sum().backward()
    assert torch.equal(live.grad, grad_hidden) and weight.grad is None
    live = weight.clone().requires_grad_()
    (call_log_probs(hidden, live, labels)[0] * grad).sum().backward()
    assert torch.equal(live.grad, grad_weight) and hidden.grad is None


def test_without_gradient_nothing_is_recorded():
    hidden, weight, labels, *_ = inputs(20, 60, 8)
    expected = call_log_probs(hidden.requires_grad_(), weight, labels, with_entropy=True)
    assert expected[0].grad_fn is not None
    with torch.no_grad():
        actual = call_log_probs(hidden, weight, labels, with_entropy=True)
    assert all(
        torch.equal(a, b) and a.grad_fn is None for a, b in zip(actual, expected, strict=True)
    )


def test_autocast_and_deterministic_mode_change_nothing():
    case = inputs(20, 60, 8)
    expected = ours(*case)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = ours(*case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_no_tokens():
    hidden, weight, labels, *_ = inputs(0, 60, 8)
    weight.requires_grad_()
    log_probs, entropy = call_log_probs(hidden, weight, labels, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == (0,) and not weight.grad.any()


def peak_bytes(call):
    """The most bytes alive at once that ``call`` allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    current = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


@pytest.mark.parametrize("count", [(), (32,)])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1024, 16_384), (512, 151_936)])
def test_peak_memory(tokens, vocabulary, count):
    """Log-prob and entropy, with both inputs' gradients; unit: one float32 [tokens, vocabulary]."""
    width = 64
    hidden, weight, labels, *_ = inputs(tokens, vocabulary, width, count=count)
    hidden.requires_grad_(), weight.requires_grad_()

    def train():
        log_probs, entropy = call_log_probs(hidden, weight, labels, with_entropy=True)
        (log_probs.sum() + entropy.sum()).backward()

    @torch.no_grad()
    def without_gradient():
        return call_log_probs(hidden, weight, labels, with_entropy=True)

    unit = 4 * tokens * vocabulary
    gradients = 4 * width * (tokens + vocabulary)
    trained = peak_bytes(train)
    scored = peak_bytes(without_gradient)
    assert trained >= gradients, "the profiler recorded too little"
    assert trained - gradients <= CHUNK_BYTES["cpu"] and trained <= 0.25 * unit
    assert scored <= 0.1 * unit


def _group_of(rank, world_size, size):
    """The process group of ``size`` consecutive ranks around ``rank``; None for one."""
    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world_size, size)]
    return None if size == 1 else groups[rank // size]


def _call_on_shard(case, group, size, rank, *, sequence_parallel, **options):
    """Give this rank its shards; return values and gradients put together again."""
    hidden, weight, *rest = case
    if sequence_parallel:
        hidden = hidden.chunk(size)[rank]
    options |= {"tp_group": group, "sequence_parallel": sequence_parallel}
    outputs = ours(hidden, weight.chunk(size)[rank], *rest, **options)

    def whole(x):
        parts = [torch.empty_like(x) for _ in range(size)]
        if size > 1:
            dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts) if size > 1 else x

    return (
        outputs[0],
        outputs[1],
        whole(outputs[2]) if sequence_parallel else outputs[2],
        whole(outputs[3]),
    )


def _check_tensor_parallel(rank, world_size):
    cases = 0
    for size in (1, 2, 4):
        group = _group_of(rank, world_size, size)
        for sequence_parallel in (False, True):
            for chunk_bytes in (ONE_TILE, MANY_TILES):
                for dtype, values, grads in (
                    (torch.float32, 1e-5, 1e-5),
                    (torch.bfloat16, 2e-5, 2**-8),
                ):
                    # Of 120 rows: none padded, some, all rows of two ranks.
                    for vocabulary, count in itertools.product((120, 85, 25), ((), (5,))):
                        case = inputs(36, vocabulary, 12, padded=120, dtype=dtype, count=count)
                        options = {"temperature": 0.8, "vocab_size": vocabulary}
                        actual = _call_on_shard(
                            case,
                            group,
                            size,
                            rank % size,
                            sequence_parallel=sequence_parallel,
                            chunk_bytes=chunk_bytes,
                            **options,
                        )
                        assert_same(actual, reference(*case, **options), values=values, grads=grads)
                        cases += 1
    return cases


def test_tensor_parallel_matches_log_softmax():
    assert run_distributed(_check_tensor_parallel, 4) == [144] * 4


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES])
@pytest.mark.parametrize("count", [1, 5, 85])
def test_top_ids_are_those_of_the_largest_logits(chunk_bytes, count):
    hidden, weight, *_ = inputs(23, 85, 12, padded=120)
    options = LogProbOptions(vocab_size=85, chunk_bytes=chunk_bytes)
    ids = top_ids_from_hidden(hidden, weight, count, options)
    logits = hidden.double() @ weight[:85].double().T
    assert torch.equal(ids, logits.topk(count).indices)


def _check_top_ids(rank, world_size):
    cases = 0
    mask = torch.arange(36) % 3 != 1
    for size in (2, 4):
        group = _group_of(rank, world_size, size)
        place = rank % size
        for sequence_parallel, vocabulary in itertools.product((False, True), (120, 25)):
            hidden, weight, *_ = inputs(36, vocabulary, 12, padded=120)
            ids = top_ids_from_hidden(
                hidden.chunk(size)[place] if sequence_parallel else hidden,
                weight.chunk(size)[place],
                5,
                LogProbOptions(vocab_size=vocabulary, chunk_bytes=MANY_TILES),
                tp_group=group,
                sequence_parallel=sequence_parallel,
                scored=ScoredRows.of(mask, *((place, size) if sequence_parallel else ())),
            )
            logits = hidden.double() @ weight[:vocabulary].double().T
            assert torch.equal(ids, logits.topk(5).indices * mask[:, None])
            cases += 1
    return cases


def test_top_ids_of_tensor_parallel_ranks():
    assert run_distributed(_check_top_ids, 4) == [8] * 4


def _check_label_owner(rank, world_size):
    """All labels on one shard, each shard in turn: gradients are right on every rank, also where
    the shard before ends with a tile of 10 rows, smaller than its others, and would have room for
    one more."""
    results = []
    for owner, chunk_bytes in itertools.product(range(world_size), (ONE_TILE, MANY_TILES)):
        hidden, weight, _, *grads = inputs(24, 84, 8)
        labels = torch.arange(24) % 21 + 21 * owner
        case = (hidden, weight, labels, *grads)
        actual = _call_on_shard(
            case,
            dist.group.WORLD,
            world_size,
            rank,
            sequence_parallel=False,
            chunk_bytes=chunk_bytes,
        )
        assert_same(actual, reference(*case))
        results.append(actual[:3])
    return results


def test_label_on_every_shard_and_equal_bits_on_all_ranks():
    first, *others = run_distributed(_check_label_owner, 4)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _count_collectives(rank, world_size):
    """Collectives before and after a forward and a backward of many tiles, by sequence_parallel."""
    counts = []
    for sequence_parallel in (False, True):
        hidden, weight, labels, grad, _ = inputs(32, 80, 8)
        hidden = (hidden.chunk(world_size)[rank] if sequence_parallel else hidden).requires_grad_()
        counts.append(collectives_so_far())
        log_probs, _ = call_log_probs(
            hidden,
            weight.chunk(world_size)[rank],
            labels,
            tp_group=dist.group.WORLD,
            sequence_parallel=sequence_parallel,
            chunk_bytes=MANY_TILES,
        )
        counts.append(collectives_so_far())
        (log_probs * grad).sum().backward()
        counts.append(collectives_so_far())
    return counts


def test_one_collective_per_pass_whatever_the_number_of_tiles():
    """Forward: the statistics; backward: hidden's gradient. Sequence parallelism gathers hidden
    in each.
    """
    assert run_distributed(_count_collectives, 2) == [[0, 1, 2, 2, 4, 6]] * 2
