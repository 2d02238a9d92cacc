"""The divergences from a teacher over the vocabulary against float64, from the whole logits."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.parallel.log_probs import LogProbOptions, TeacherHead, divergence_from_hidden
from megatron_gspo.parallel.scored_rows import ScoredRows
from tests.parallel.calls import call_log_probs
from tests.support.distributed import collectives_so_far, run_distributed

ONE_TILE = 2**30
MANY_TILES = 4_000
WEIGHTS = ((1.0, 0.0), (0.0, 1.0), (0.7, 0.3))  # of the reverse and the forward divergence


@dataclass(frozen=True)
class Inputs:
    """Of a policy and of a teacher of another width; rows beyond the vocabulary are large."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    teacher: TeacherHead
    grad_log_probs: Tensor
    grad_entropy: Tensor
    grad_divergences: Tensor


def draw(tokens: int, vocabulary: int, padded: int | None = None, size: float = 1.0) -> Inputs:
    g = torch.Generator().manual_seed(tokens)
    rows = padded or vocabulary
    weight, teacher_weight = torch.randn(rows, 12, generator=g), torch.randn(rows, 9, generator=g)
    weight[vocabulary:] = teacher_weight[vocabulary:] = 7.0
    return Inputs(
        hidden=torch.randn(tokens, 12, generator=g) * size,
        weight=weight,
        labels=torch.randint(0, vocabulary, (tokens,), generator=g),
        teacher=TeacherHead(torch.randn(tokens, 9, generator=g) * size, teacher_weight),
        grad_log_probs=torch.randn(tokens, generator=g),
        grad_entropy=torch.randn(tokens, generator=g),
        grad_divergences=torch.randn(tokens, 2, generator=g),
    )


def reference(case: Inputs, mask: Tensor, temperature: float, vocabulary: int) -> list[Tensor]:
    """Log-probs, entropy, divergences, hidden.grad and weight.grad in float64."""
    hidden, weight = (x.double().requires_grad_() for x in (case.hidden, case.weight))
    teacher_logits = case.teacher.hidden.double() @ case.teacher.weight.double()[:vocabulary].T
    t = (teacher_logits / temperature).log_softmax(-1)
    p = (hidden @ weight[:vocabulary].T / temperature).log_softmax(-1)
    log_probs = p.gather(1, case.labels[:, None])[:, 0] * mask
    entropy = -(p.exp() * p).sum(-1) * mask
    reverse = (p.exp() * (p - t)).sum(-1)
    forward = (t.exp() * (t - p)).sum(-1)
    divergences = torch.stack((reverse, forward), 1) * mask[:, None]
    loss = (log_probs * case.grad_log_probs).sum() + (entropy * case.grad_entropy).sum()
    (loss + (divergences * case.grad_divergences).sum()).backward()
    return [x.detach() for x in (log_probs, entropy, divergences, hidden.grad, weight.grad)]


def ours(case: Inputs, mask: Tensor | None = None, rank: int = 0, size: int = 1, **where) -> list:
    """The same five of a rank."""
    options = where.pop("options")
    shared = where.get("sequence_parallel", False)
    scored = None
    if mask is not None:
        scored = ScoredRows.of(mask, *((rank, size) if shared else ()))
    hidden, of_teacher = case.hidden, case.teacher.hidden
    if shared:
        hidden, of_teacher = hidden.chunk(size)[rank], of_teacher.chunk(size)[rank]
    hidden = hidden.clone().requires_grad_()
    weight = case.weight.chunk(size)[rank].clone().requires_grad_()
    of_teacher = of_teacher if scored is None else scored.select_own(of_teacher)
    teacher = TeacherHead(
        of_teacher.clone().requires_grad_(),
        case.teacher.weight.chunk(size)[rank].clone().requires_grad_(),
    )
    log_probs, entropy, divergences = divergence_from_hidden(
        hidden, weight, case.labels, teacher, options, scored=scored, **where
    )
    loss = (log_probs * case.grad_log_probs).sum() + (entropy * case.grad_entropy).sum()
    (loss + (divergences * case.grad_divergences).sum()).backward()
    assert teacher.hidden.grad is None and teacher.weight.grad is None
    return [x.detach() for x in (log_probs, entropy, divergences, hidden.grad, weight.grad)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Absolute on values, relative to the largest entry of a gradient."""
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        limit = 2e-5 * (b.abs().max().item() if number > 2 else 1.0)
        error = (a.double() - b).abs().max().item()
        assert error <= limit, f"result {number}: off by {error:.2e}, allowed {limit:.2e}"


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, MANY_TILES, None])
@pytest.mark.parametrize(("temperature", "padded"), [(1.0, None), (0.6, 128)])
def test_against_float64(chunk_bytes: int | None, temperature: float, padded: int | None) -> None:
    case = draw(37, 101, padded)
    options = LogProbOptions(temperature, 101, with_entropy=True, chunk_bytes=chunk_bytes)
    expected = reference(case, torch.ones(37), temperature, 101)
    assert_same(ours(case, options=options), expected)
    mask = (torch.arange(37) % 3 != 1).float()
    assert_same(ours(case, mask, options=options), reference(case, mask, temperature, 101))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_gradient_is_that_of_the_kl_by_enumeration(weights: tuple[float, float]) -> None:
    """Of the logits of 7 ids, as the derivative of the sum over all ids, by hand."""
    g = torch.Generator().manual_seed(3)
    logits, teacher_logits = torch.randn(2, 7, generator=g, dtype=torch.float64)
    hidden = logits[None].clone().requires_grad_()
    identity = torch.eye(7, dtype=torch.float64)
    _, _, divergences = divergence_from_hidden(
        hidden,
        identity,
        torch.zeros(1, dtype=torch.int64),
        TeacherHead(teacher_logits[None], identity),
    )
    (divergences * torch.tensor([weights])).sum().backward()
    p, t = ([math.exp(x) for x in row.log_softmax(0)] for row in (logits, teacher_logits))
    reverse = sum(p[v] * math.log(p[v] / t[v]) for v in range(7))
    forward = sum(t[v] * math.log(t[v] / p[v]) for v in range(7))
    assert divergences[0].tolist() == pytest.approx([reverse, forward], abs=1e-12)
    for v in range(7):
        # d p_u / d x_v = p_u ([u = v] - p_v)
        slopes = [p[u] * ((u == v) - p[v]) for u in range(7)]
        of_reverse = sum(slopes[u] * (math.log(p[u] / t[u]) + 1) for u in range(7))
        of_forward = sum(-t[u] / p[u] * slopes[u] for u in range(7))
        expected = weights[0] * of_reverse + weights[1] * of_forward
        assert float(hidden.grad[0, v]) == pytest.approx(expected, abs=1e-7)


def test_a_teacher_that_agrees_leaves_nothing_to_learn() -> None:
    case = draw(20, 60)
    hidden = case.hidden.clone().requires_grad_()
    teacher = TeacherHead(case.hidden, case.weight)
    *_, divergences = divergence_from_hidden(hidden, case.weight, case.labels, teacher)
    divergences.sum().backward()
    assert float(divergences.detach().abs().max()) < 1e-6 and float(hidden.grad.abs().max()) < 1e-5


def test_logits_of_thousands() -> None:
    """Nothing overflows where a teacher is certain of another id. A float32 logit of 1e4 is known to
    1e-3.
    """
    case = draw(30, 50, size=1e3)
    options = LogProbOptions(with_entropy=True, chunk_bytes=MANY_TILES)
    expected = reference(case, torch.ones(30), 1.0, 50)
    for a, b in zip(ours(case, options=options), expected, strict=True):
        assert float((a.double() - b).abs().max()) <= 1e-3 * float(b.abs().max()) + 5e-3


def test_no_tokens_and_shapes() -> None:
    case = draw(4, 60)
    teacher = TeacherHead(case.teacher.hidden[:0], case.teacher.weight)
    hidden = case.hidden[:0].clone().requires_grad_()
    log_probs, _, divergences = divergence_from_hidden(
        hidden, case.weight, case.labels[:0], teacher
    )
    (log_probs.sum() + divergences.sum()).backward()
    assert divergences.shape == (0, 2)
    with pytest.raises(ValueError, match="the teacher's hidden"):
        divergence_from_hidden(case.hidden, case.weight, case.labels, teacher)


def _check_ranks(rank: int, world_size: int) -> list[int]:
    """Also with all rows of one rank beyond the vocabulary; the collectives of a call."""
    counts = []
    mask = (torch.arange(36) % 3 != 1).float()
    for shared, vocabulary in itertools.product((False, True), (110, 50)):
        case = draw(36, vocabulary, 120)
        options = LogProbOptions(0.8, vocabulary, with_entropy=True, chunk_bytes=MANY_TILES)
        counts.append(-collectives_so_far())
        group = dict(tp_group=dist.group.WORLD, sequence_parallel=shared)
        actual = ours(case, mask, rank, world_size, options=options, **group)
        counts[-1] += collectives_so_far()
        expected = reference(case, mask, 0.8, vocabulary)
        if shared:
            expected[3] = expected[3].chunk(world_size)[rank]
        expected[4] = expected[4].chunk(world_size)[rank]
        assert_same(actual, expected)
    return counts


def test_tensor_and_sequence_parallel_ranks() -> None:
    """Sequence parallelism gathers the teacher's hidden states too."""
    assert run_distributed(_check_ranks, 2) == [[2, 2, 6, 6]] * 2


def _seconds(call) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "of_teacher", "limit"), [(2048, 2048, 2.0), (1024, 2048, 2.5)])
def test_cost_relative_to_the_head(width: int, of_teacher: int, limit: float) -> None:
    """CPU time of this process, of log-probs alone and with the divergences: 6 products for 4 where
    both models are as wide."""
    tokens, vocabulary = 512, 4096
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    teacher = TeacherHead(
        torch.randn(tokens, of_teacher), torch.randn(vocabulary, of_teacher) / of_teacher**0.5
    )

    def alone() -> None:
        call_log_probs(hidden, weight, labels, chunk_bytes=6 * 2**20)[0].sum().backward()

    def compared() -> None:
        options = LogProbOptions(chunk_bytes=12 * 2**20)
        log_probs, _, divergences = divergence_from_hidden(hidden, weight, labels, teacher, options)
        (log_probs.sum() + divergences.sum()).backward()

    ratio = _seconds(compared) / _seconds(alone)
    print(f"{width} beside {of_teacher}: {ratio:.2f} times the head")
    assert ratio < limit
