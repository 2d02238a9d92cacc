import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_gspo.config import SamplingParams
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.embedded.token_sampling import (
    choose_tokens,
    philox_4x32,
    sequence_uniforms,
)


def words(*values):
    return tuple(np.array([v], dtype=np.uint64) for v in values)


def test_philox_gives_the_published_known_answers():
    # kat_vectors of the Random123 distribution, philox4x32 with 10 rounds
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        assert tuple(int(w[0]) for w in philox_4x32(words(*counter), key)) == expected


def test_uniforms_depend_on_seed_prompt_sample_and_position_alone():
    prompt = np.array([5, 7, 2**40 + 5])
    sample = np.array([0, 3, 0])
    table = sequence_uniforms(11, prompt, sample, 10)
    assert table.shape == (3, 10) and table.dtype == np.float32
    assert 0 <= table.min() and table.max() < 1
    np.testing.assert_array_equal(
        sequence_uniforms(11, prompt[[2, 0]], sample[[2, 0]], 6), table[[2, 0], :6]
    )
    others = [
        sequence_uniforms(12, prompt[:1], sample[:1], 10),
        sequence_uniforms(11 + 2**32, prompt[:1], sample[:1], 10),
        sequence_uniforms(11, prompt[:1] + 1, sample[:1], 10),
        sequence_uniforms(11, prompt[:1], sample[:1] + 1, 10),
        table[2:],  # differs from row 0 in the high word of the prompt index only
    ]
    for other in others:
        assert not np.isclose(other, table[:1]).any()


def test_uniforms_are_uniform_and_uncorrelated():
    table = sequence_uniforms(3, np.arange(400) // 8, np.arange(400) % 8, 50).astype(np.float64)
    n = table.size
    counts = np.bincount((table.ravel() * 20).astype(int), minlength=20)
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 43.8  # chi-square, 19 degrees, 0.999
    centred = table - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((a * b).mean() * 12) < 4 / math.sqrt(a.size)


def exact_probs(logits, temperature, top_k, top_p, min_p=0.0):
    """A naive double-precision reference: temperature, then top-k, then top-p and min-p on what is
    left."""
    weights = [math.exp(x / temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = ranked[: top_k or len(ranked)]
    mass = sum(probs[i] for i in kept)
    nucleus = []
    before = 0.0
    for i in kept:
        if nucleus and (before >= top_p * mass or probs[i] < min_p * probs[ranked[0]]):
            break
        nucleus.append(i)
        before += probs[i]
    return [probs[i] / before if i in nucleus else 0.0 for i in range(len(probs))], probs


LOGITS = [0.3, -1.0, 2.0, 0.0, 1.4, -3.0, 0.9, -0.2]


@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (2.0, 3, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.3, 5, 0.8, 0.2),
        (1.0, 0, 1.0, 0.3),
    ],
)
def test_drawn_frequencies_match_the_exact_distribution(temperature, top_k, top_p, min_p):
    n = 40_000
    sampling = SamplingParams(1, 1, temperature, top_p, top_k, min_p)
    draws = torch.from_numpy(
        sequence_uniforms(1, np.arange(n), np.zeros(n, dtype=np.int64), 1)[:, 0]
    )
    tokens, log_probs, *_ = choose_tokens(torch.tensor(LOGITS).expand(n, -1), draws, sampling)
    expected, untruncated = exact_probs(LOGITS, temperature, top_k, top_p, min_p)
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    support = np.array(expected) > 0
    assert counts[~support].sum() == 0
    chi_square = (
        (counts - n * np.array(expected))[support] ** 2 / (n * np.array(expected)[support])
    ).sum()
    assert chi_square < 24.3  # 7 degrees, 0.999; fewer degrees have a lower bound
    np.testing.assert_allclose(log_probs.numpy(), np.log(untruncated)[tokens.numpy()], atol=1e-6)


def test_inverse_cdf_by_hand():
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(5, -1)
    draws = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71])
    assert choose_tokens(logits, draws, SamplingParams(1, 1))[0].tolist() == [0, 0, 1, 1, 2]
    ranked = SamplingParams(1, 1, top_k=2)  # order 1, 2 with 0.625 and 0.375
    assert choose_tokens(logits, torch.tensor([0.0, 0.62, 0.63, 0.99, 0.5]), ranked)[
        0
    ].tolist() == [
        1,
        1,
        2,
        2,
        1,
    ]
    nucleus = SamplingParams(1, 1, top_p=0.5)  # the mass before token 2 is 0.5, not below top_p
    assert set(choose_tokens(logits, draws, nucleus)[0].tolist()) == {1}


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.full((2, 6), float("-inf"))
    logits[:, [2, 4]] = 0.0
    draws = torch.tensor([0.0, 1.0 - 2.0**-24])
    tokens, log_probs, *_ = choose_tokens(logits, draws, SamplingParams(1, 1))
    assert tokens.tolist() == [2, 4]
    np.testing.assert_allclose(log_probs, math.log(0.5), rtol=1e-6)


def test_greedy_takes_the_argmax_and_scores_at_temperature_one():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    tokens, log_probs, *_ = choose_tokens(logits, None, SamplingParams(1, 1, temperature=0.0))
    assert tokens.tolist() == [2, 5]
    _, probs = exact_probs(LOGITS, 1.0, 0, 1.0)
    np.testing.assert_allclose(log_probs, math.log(probs[2]), atol=1e-6)


def test_the_most_likely_ids_and_their_log_probs_at_the_temperature():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    choice = choose_tokens(logits, torch.zeros(2), SamplingParams(1, 1, 0.6), top_count=3)
    _, probs = exact_probs(LOGITS, 0.6, 0, 1.0)
    assert choice.top_ids.tolist() == [[2, 4, 6], [5, 3, 1]]
    expected = np.log([[probs[2], probs[4], probs[6]]] * 2)
    np.testing.assert_allclose(choice.top_log_probs.numpy(), expected, atol=1e-6)
    assert choose_tokens(logits, torch.zeros(2), SamplingParams(1, 1)).top_ids.shape == (2, 0)


def test_the_ids_that_could_be_drawn_and_log_probs_over_them():
    flat = [0.0] * 3 + [-4.0] * 5
    logits = torch.tensor([LOGITS, flat])
    sampling = SamplingParams(1, 1, temperature=0.8, top_p=0.75, min_p=0.3, max_support=3)
    choice = choose_tokens(logits, torch.tensor([0.9, 0.5]), sampling)
    assert choice.support.tolist() == [[2, 4, -1], [0, 1, 2]]
    for row, token in enumerate(choice.tokens.tolist()):
        expected, _ = exact_probs(logits[row].tolist(), 0.8, 0, 0.75, 0.3)
        assert {i for i, share in enumerate(expected) if share} == {
            i for i in choice.support[row].tolist() if i >= 0
        }
        assert float(choice.log_probs[row]) == pytest.approx(math.log(expected[token]), abs=1e-6)
    too_many = (
        "rollout.max_support = 2: 3 ids could be drawn .* rollout.top_k, or raise rollout.min_p"
    )
    with pytest.raises(EngineError, match=too_many):
        choose_tokens(logits, torch.zeros(2), replace(sampling, max_support=2))
    unasked = choose_tokens(logits, torch.zeros(2), replace(sampling, max_support=0))
    assert unasked.support is None
