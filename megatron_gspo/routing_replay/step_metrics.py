"""The routing metrics of one training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_gspo.routing_replay.statistics import RoutingStats


@dataclass
class StepRouting:
    """What a step measured about routes; the same on every rank except for ``bytes_moved`` and
    ``flips``.
    """

    old: RoutingStats | None = None
    """Statistics of the old policy's pass, in which choices are compared with the rollout
    engine's."""

    updates: list[RoutingStats] = field(default_factory=list)
    """Statistics of each update, compared with the routes that the samples carry."""

    flips: np.ndarray | None = None
    """Flips of the last update, a column of its responses (`flips_of_replica`), where measured."""

    selections_changed: list[float | None] = field(default_factory=list)
    """Of each update, the share of sparse attention's selected positions that differ from the old
    policy's; None where no sampled query was in both passes."""

    selections_unlike_rollout: list[float | None] = field(default_factory=list)
    """The same between the old policy's pass and the rollout engine, where there was a pass."""

    missing_routes: int = 0
    """Tokens whose route the rollout engine doesn't return."""

    bytes_stored: int = 0
    """Size of the samples' routes on all pipeline stages."""

    bytes_moved: int = 0
    """Bytes of routes that this rank sent or copied."""

    def metrics(self) -> dict[str, float]:
        """The scalars of ``metrics.jsonl``; see docs/metrics.md."""
        metrics: dict[str, float] = {}
        rates = _flip_rates(self.updates)
        if rates:
            metrics["routing/flip_rate"] = float(np.mean(rates))
            flipped = [stats.flipped_tokens for stats in self.updates if stats.compared]
            metrics["routing/flipped_tokens"] = float(np.mean(flipped))
        if self.old is not None:
            for rate in _flip_rates([self.old]):
                metrics["routing/rollout_flip_rate"] = float(np.mean(rate))
                metrics["routing/rollout_flipped_tokens"] = self.old.flipped_tokens
            if self.old.entropy is not None:
                metrics["routing/entropy"] = float(self.old.entropy.mean())
            if self.old.load is not None:
                metrics["routing/load_imbalance"] = float(
                    (self.old.load.max(1) / self.old.load.mean(1)).mean()
                )
        if changed := [share for share in self.selections_changed if share is not None]:
            metrics["routing/selection_flip_rate"] = float(np.mean(changed))
        if unlike := [share for share in self.selections_unlike_rollout if share is not None]:
            metrics["routing/rollout_selection_flip_rate"] = float(np.mean(unlike))
        if metrics or self.bytes_stored:
            metrics["routing/replay_bytes"] = float(self.bytes_stored)
            metrics["routing/bytes_moved"] = float(self.bytes_moved)
        if self.missing_routes:
            metrics["routing/missing_routes"] = float(self.missing_routes)
        return metrics

    def by_layer(self) -> dict[str, Any]:
        """The record of ``routing.jsonl``: lists by MoE layer, null where nothing was measured."""
        updates = _flip_rates(self.updates)
        old = self.old
        rollout = _flip_rates([old]) if old is not None else []
        return {
            "flip_rate": np.mean(updates, axis=0).tolist() if updates else None,
            "rollout_flip_rate": rollout[0].tolist() if rollout else None,
            "entropy": (
                old.entropy.tolist() if old is not None and old.entropy is not None else None
            ),
            "load": old.load.tolist() if old is not None and old.load is not None else None,
        }


def _flip_rates(passes: Sequence[RoutingStats]) -> list[np.ndarray]:
    """The flip rates by layer of the passes that compared tokens."""
    return [stats.flip_rate for stats in passes if stats.compared and stats.flip_rate is not None]
