"""The routing metrics of one training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_gspo.routing_replay.statistics import RoutingStats


@dataclass
class StepRouting:
    """What a step measured about routes; the same on every rank except for ``bytes_moved``.

    old: statistics of the old policy's pass, in which choices are compared with the rollout engine's. updates: of each
    update, compared with the routes that the samples carry. flips: of the last update, by sample and response token,
    where measured. missing_routes: tokens whose route the rollout engine doesn't know. bytes_stored: size of the
    samples' routes. bytes_moved: sent or copied by this rank.
    """

    old: RoutingStats | None = None
    updates: list[RoutingStats] = field(default_factory=list)
    flips: list[np.ndarray] | None = None
    missing_routes: int = 0
    bytes_stored: int = 0
    bytes_moved: int = 0

    def metrics(self) -> dict[str, float]:
        """The scalars of ``metrics.jsonl``; see docs/metrics.md."""
        found: dict[str, float] = {}
        updates = [stats for stats in self.updates if stats.compared]
        if updates:
            found["routing/flip_rate"] = float(np.mean([stats.flip_rate for stats in updates]))
            found["routing/flipped_tokens"] = float(np.mean([stats.flipped_tokens for stats in updates]))
        if self.old is not None:
            if self.old.compared:
                found["routing/rollout_flip_rate"] = float(np.mean(self.old.flip_rate))
                found["routing/rollout_flipped_tokens"] = self.old.flipped_tokens
            if self.old.entropy is not None:
                found["routing/entropy"] = float(self.old.entropy.mean())
            if self.old.load is not None:
                found["routing/load_imbalance"] = float((self.old.load.max(1) / self.old.load.mean(1)).mean())
        if found or self.bytes_stored:
            found["routing/replay_bytes"] = float(self.bytes_stored)
            found["routing/bytes_moved"] = float(self.bytes_moved)
        if self.missing_routes:
            found["routing/missing_routes"] = float(self.missing_routes)
        return found

    def by_layer(self) -> dict[str, Any]:
        """The record of ``routing.jsonl``: lists by MoE layer, null where nothing was measured."""
        updates = [stats.flip_rate for stats in self.updates if stats.compared]
        old = self.old
        return {
            "flip_rate": np.mean(updates, axis=0).tolist() if updates else None,
            "rollout_flip_rate": old.flip_rate.tolist() if old is not None and old.compared else None,
            "entropy": old.entropy.tolist() if old is not None and old.entropy is not None else None,
            "load": old.load.tolist() if old is not None and old.load is not None else None,
        }
