"""Turns of a multi-turn sample: the tokens and the reward of each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_gspo.data.sample import Sample

TURNS = "turns"  # the key of `Sample.metadata`


@dataclass(frozen=True)
class Span:
    """A response within an episode: response tokens start .. end-1 of the sample, and its
    reward.
    """

    start: int
    end: int
    reward: float


def spans(sample: Sample) -> list[Span]:
    """The turns of a sample, in order; [] for a single-turn sample."""
    return [Span(**turn) for turn in sample.metadata.get(TURNS, ())]


def with_spans(turns: Sequence[Span]) -> dict[str, Any]:
    """The entry of `Sample.metadata` for these turns."""
    return {TURNS: [asdict(span) for span in turns]}
