"""How tokens are weighted where the loss is centred."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScoreCentering:
    """The weight of a token in the loss, by the ratio p / q of policy and rollout engine."""

    bounds: tuple[float, float] | None = None
    """The weight is the ratio between these; None: it is 1."""

    kept: tuple[float, float] | None = None
    """Outside these the weight is 0; None: nowhere."""
