"""Accuracy of a model from n samples per prompt: mean@k and pass@k."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

_SUCCESS = 1.0  # least reward of a response that succeeds


def mean_at_k(rewards: ArrayLike, k: int | None = None) -> float:
    """Mean reward of the first k samples (default: all) of every prompt, averaged over prompts.

    rewards: [prompts, n]. Raises ValueError for a wrong shape, a non-finite reward or a k outside
    1..n.
    """
    table = _table(rewards, k)
    return float(table[:, :k].mean())


def pass_at_k(rewards: ArrayLike, k: int) -> float:
    """The probability that at least one of k samples succeeds, averaged over prompts.

    Unbiased from n >= k samples, c of which succeed (reward >= 1): 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, "Evaluating large language models trained on code", equation 1). rewards:
    [prompts, n]. Raises ValueError for a wrong shape, a non-finite reward or a k outside 1..n.
    """
    return float(prompt_pass_at_k(rewards, k).mean())


def prompt_pass_at_k(rewards: ArrayLike, k: int) -> np.ndarray:
    """[prompts] float64: `pass_at_k` of each prompt."""
    table = _table(rewards, k)
    n = table.shape[1]
    successes = (table >= _SUCCESS).sum(axis=1)
    return np.array([1.0 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])[successes]


def _table(rewards: ArrayLike, k: int | None) -> np.ndarray:
    table = np.asarray(rewards, dtype=np.float64)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(
            f"rewards has shape {list(table.shape)}: give [prompts, n] with at least one of each"
        )
    if not np.isfinite(table).all():
        prompt = int(np.argwhere(~np.isfinite(table))[0, 0])
        raise ValueError(
            f"prompt {prompt} has a non-finite reward: score every sample before the evaluation"
        )
    if k is not None and not 1 <= k <= table.shape[1]:
        raise ValueError(f"k={k}: use 1 to {table.shape[1]}, the number of samples a prompt")
    return table
