"""Sampling of tokens: counter-based random numbers and inverse-CDF sampling, independent of the
batch layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.config import SamplingParams
from megatron_gspo.errors import EngineError

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_4x32(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3").

    counter: four broadcastable uint64 arrays of 32-bit words; key: two 32-bit words.
    Returns four uint64 arrays of 32-bit words of the broadcast shape.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _HALF) ^ c1 ^ np.uint64(k0)
        c2 = (product0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1 = product1 & _WORD
        c3 = product0 & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def sequence_uniforms(
    seed: int, prompt_index: np.ndarray, sample_index: np.ndarray, length: int
) -> np.ndarray:
    """One uniform number per (sequence, position).

    Each is a function of (seed, prompt_index, sample_index, position) alone.

    Args:
        seed: its low 64 bits count.
        prompt_index, sample_index: [N] int64; the low 32 bits of sample_index count.
        length: numbers of each sequence.

    Returns:
        [N, length] float32, multiples of 2^-24 in [0, 1).
    """
    blocks = -(-length // 4)
    prompt = np.asarray(prompt_index, dtype=np.int64).astype(np.uint64)[:, None]
    sample = np.asarray(sample_index, dtype=np.int64).astype(np.uint64)[:, None]
    position = np.arange(blocks, dtype=np.uint64)[None]
    counter = np.broadcast_arrays(position, sample & _WORD, prompt & _WORD, prompt >> _HALF)
    words = philox_4x32(tuple(counter), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    bits = np.stack(words, axis=-1).reshape(len(prompt), blocks * 4)[:, :length]
    return (bits >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


class Choice(NamedTuple):
    """The next token of each of B rows."""

    tokens: Tensor
    """[B] int64."""

    log_probs: Tensor
    """[B] float32 under softmax(logits / temperature), untruncated; over the support where it is
    returned."""

    top_ids: Tensor
    """[B, K] int64, the most likely ids, descending."""

    top_log_probs: Tensor
    """[B, K] float32, of these."""

    support: Tensor | None
    """[B, W] int64, the ids that could be drawn, descending, -1 after a row's; None without
    `SamplingParams.max_support`."""


def choose_tokens(
    logits: Tensor, uniforms: Tensor | None, sampling: SamplingParams, *, top_count: int = 0
) -> Choice:
    """The next token of every row.

    logits: [B, V] any float dtype; uniforms: [B] float32 in [0, 1) (not read when greedy);
    top_count: K of the result. A row with NaN logits gets some token and a NaN log-prob. Raises
    EngineError for a support of more than `max_support` ids.
    """
    scores = logits.float()
    if sampling.scoring_temperature != 1.0:
        scores = scores / sampling.scoring_temperature
    total = scores.logsumexp(-1, keepdim=True)
    support = None
    if sampling.greedy:
        tokens = scores.argmax(-1, keepdim=True)
    else:
        assert uniforms is not None
        tokens, support = _inverse_cdf((scores - total).exp_(), uniforms, sampling)
    top_scores, top_ids = scores.topk(top_count, dim=-1)
    top_log_probs = top_scores - total
    if sampling.max_support and support is not None:
        _check_support(support.shape[1], sampling)
        of_support = scores.gather(1, support.clamp(min=0))
        total = of_support.masked_fill(support < 0, -torch.inf).logsumexp(-1, keepdim=True)
    log_probs = (scores.gather(1, tokens) - total)[:, 0]
    return Choice(
        tokens[:, 0], log_probs, top_ids, top_log_probs, support if sampling.max_support else None
    )


def _check_support(width: int, sampling: SamplingParams) -> None:
    if width > sampling.max_support:
        raise EngineError(
            f"rollout.max_support = {sampling.max_support}: {width} ids could be drawn at a token;"
            " raise it, lower rollout.top_p or rollout.top_k, or raise rollout.min_p"
        )


def _inverse_cdf(
    probs: Tensor, uniforms: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor | None]:
    """[B, V] probabilities and [B] uniforms -> [B, 1] tokens of the (truncated, renormalised)
    distribution, and its ids as `Choice.support`; None where it is not truncated.

    The token is the first whose cumulated probability exceeds u * total. In float64, u <= 1 - 2^-24
    keeps that threshold below the total, and a token of probability 0 is never the first to exceed
    anything.
    """
    order = None
    if sampling.truncates:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        if sampling.top_k:
            probs = probs[:, : sampling.top_k]
            order = order[:, : sampling.top_k]
    cumulated = probs.cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    kept = torch.full_like(total, probs.shape[1], dtype=torch.int64)
    if sampling.top_p < 1:
        in_nucleus = (cumulated - probs) < sampling.top_p * total
        kept = torch.minimum(kept, in_nucleus.sum(-1, keepdim=True).clamp_(min=1))
    if sampling.min_p > 0:
        is_likely = probs >= sampling.min_p * probs[:, :1]
        kept = torch.minimum(kept, is_likely.sum(-1, keepdim=True).clamp_(min=1))
    total = cumulated.gather(1, kept - 1)
    threshold = uniforms[:, None].double() * total
    tokens = torch.searchsorted(cumulated, threshold, right=True).clamp_(max=probs.shape[1] - 1)
    if order is None:
        return tokens, None
    support = order[:, : int(kept.max())]
    is_outside = torch.arange(support.shape[1], device=support.device) >= kept
    return order.gather(1, tokens), support.masked_fill(is_outside, -1)
