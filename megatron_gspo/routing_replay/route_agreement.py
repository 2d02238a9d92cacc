"""Routes that are valid but of another token, another sample or another model, found by the live
routers' choices.

Every choice of a live router is compared with the given route of its token (*own*) and with those
of the tokens after and before it. The last two show how much unrelated routes agree in this model
and pass (*chance*). Own routes should agree as well as routes do in this pass, or fully, where both
routers have the same weights and no perturbation (*expected*).

A run of rows is refused where it agrees less than halfway between the two. The certainty comes from
a likelihood ratio: for values in [0, 1] with a mean of at least ``middle``, ``exp(score)`` below
has a mean of at most 1, so that the largest sum over consecutive rows exceeds ``log(rows / p)``
with a probability of at most p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FALSE_ALARM = 1e-6  # probability per pass that rows which agree halfway are refused


@dataclass(frozen=True)
class Levels:
    """Shares of the experts in which a live choice agrees with its own token's route and with
    another token's.
    """

    expected: float
    """Share with the route of the same token, as the module says."""

    chance: float
    """Share with the route of another token, as the module says."""

    rows: int
    """How many rows were compared."""

    @classmethod
    def of(cls, sums: np.ndarray, *, same_routers: bool) -> Levels | None:
        """From sums ``[3, 2]``: share and count of own, following and preceding routes; None where
        nothing tells them apart. same_routers: the given routes are of the same weights, without
        a perturbation."""
        if not sums[:, 1].all():
            return None
        means = sums[:, 0] / sums[:, 1]
        # of shifted routes a neighbour's row agrees best, and then the own one shows the chance
        expected = 1.0 if same_routers else float(means.max())
        chance = float(means.min())
        if expected - chance < 1e-3:
            return None
        return cls(expected, max(chance, 1e-3), int(sums[0, 1]))

    @property
    def middle(self) -> float:
        """Halfway between both."""
        return (self.expected + self.chance) / 2

    def scores(self, shares: np.ndarray) -> np.ndarray:
        """Log-likelihood ratio of agreeing by chance to agreeing halfway, float64 ``[rows]``
        from shares ``[rows]``.
        """
        agreed = np.log(self.chance / self.middle)
        differed = np.log((1 - self.chance) / (1 - self.middle))
        return shares * agreed + (1 - shares) * differed


def level_sums(shares: np.ndarray) -> np.ndarray:
    """Sum and count of shares ``[rows, n]`` where they aren't NaN, ``[n, 2]``: `Levels.of` takes
    those of own, following and preceding routes."""
    compared = ~np.isnan(shares)
    return np.stack([np.where(compared, shares, 0.0).sum(0), compared.sum(0)], axis=1)


def disagreeing_rows(shares: np.ndarray, levels: Levels) -> slice | None:
    """The consecutive rows that certainly agree less than halfway, or None.

    shares: ``[rows]``, of the experts in which the live choice agrees with its token's own route.
    """
    if not len(shares):
        return None
    sums = np.concatenate([[0.0], np.cumsum(levels.scores(shares))])
    lowest = np.minimum.accumulate(sums)
    end = int((sums - lowest).argmax())
    if sums[end] - lowest[end] <= np.log(levels.rows / FALSE_ALARM):
        return None
    return slice(int(sums[: end + 1].argmin()), end)


def route_mismatch(
    shares: np.ndarray, starts: np.ndarray, names: Sequence[tuple[int, int]], levels: Levels
) -> str:
    """What is wrong with the routes of some samples; empty where they may be those of the routers.

    Args:
        shares: float64 ``[rows, 3]`` as in `level_sums`, of samples end to end.
        starts: ``[N + 1]`` their bounds, a row for each input token.
        names: (prompt_index, sample_index) of each.
    """
    compared = np.flatnonzero(~np.isnan(shares[:, 0]))
    disagreeing = disagreeing_rows(shares[compared, 0], levels)
    if disagreeing is None:
        return ""
    rows = compared[disagreeing]
    score = levels.scores(shares[rows, 0])
    sample_of = np.searchsorted(starts, rows, side="right") - 1
    worst = int(np.bincount(sample_of, score).argmax())  # the sample with most of the evidence
    rows = rows[sample_of == worst]
    others = len(np.unique(sample_of)) - 1
    prompt, number = names[worst]
    first = rows[0] - starts[worst]
    last = rows[-1] - starts[worst]
    tokens = f"token {first}" if first == last else f"tokens {first} to {last}"
    more = f" (and {others} more)" if others else ""
    return (
        f"sample {prompt}/{number}{more}: routed_experts of {tokens} agree with"
        f" {shares[rows, 0].mean():.0%} of the live routers' experts; {levels.expected:.0%} was"
        " expected, and another token's agree with"
        f" {levels.chance:.0%}{_shift(shares[rows, 1:], levels)}"
    )


def _shift(shares: np.ndarray, levels: Levels) -> str:
    """Whether rows fit the token beside theirs, from shares ``[rows, 2]`` of the following and
    preceding routes.
    """
    (following, after), (preceding, before) = level_sums(shares)
    means = following / max(after, 1.0), preceding / max(before, 1.0)
    if max(means) <= levels.middle:
        return ""
    return (
        f"; rows of the token {'after' if means[0] > means[1] else 'before'} fit, so they are"
        " shifted by one"
    )
