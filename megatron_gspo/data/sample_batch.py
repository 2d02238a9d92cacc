"""A rollout batch over ranks: a row of numbers for each sample on every rank, and the samples that
this rank holds.

Decisions (advantages, filters, mini-batches, packing) are functions of the rows, so every rank
makes the same ones. Once the samples are on the ranks that train them, they are a `TrainingBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.sample import FINISH_REASONS, Sample
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.parallel.collectives import group_rank
from megatron_gspo.parallel.host_exchange import (
    gather_bytes,
    max_over_ranks,
    rows_in_place,
    sum_over_ranks,
)

ROW = np.dtype(
    [
        ("prompt_index", np.int64),
        ("reward", np.float64),
        ("rows", np.int64),  # sequences of the model
        ("sample_index", np.int32),
        ("prompt_length", np.int32),
        ("response_length", np.int32),
        ("trained", np.int32),  # tokens in the loss
        ("oldest_version", np.int32),
        ("newest_version", np.int32),
        ("turns", np.int32),  # of an episode; 0 for a single-turn sample
        ("turn_tokens", np.int32),  # tokens of its turns
        ("holder", np.int32),  # rank in the batch's group
        ("finish", np.uint8),  # position in FINISH_REASONS
        ("has_rollout_log_probs", np.bool_),
        ("has_versions", np.bool_),
        ("has_routes", np.bool_),
    ]
)
"""What every rank holds of a sample: 64 bytes."""


def row_of(sample: Sample, holder: int = 0) -> tuple:
    """A sample's values in the order of `ROW`."""
    turns = spans(sample)
    versions = sample.token_versions
    newest = (
        int(versions.max()) if versions is not None and versions.size else sample.weight_version
    )
    return (
        sample.prompt_index,
        sample.reward,
        sample.num_rows,
        sample.sample_index,
        sample.prompt_length,
        sample.response_length,
        int(sample.loss_mask.sum()),
        sample.weight_version,
        newest,
        len(turns),
        sum(turn.end - turn.start for turn in turns),
        holder,
        FINISH_REASONS.index(sample.finish_reason),
        sample.rollout_log_probs is not None,
        versions is not None,
        sample.routed_experts is not None,
    )


def rows_of(samples: Iterable[Sample], holder: int = 0) -> np.ndarray:
    """[n] of `ROW`."""
    return np.array([row_of(sample, holder) for sample in samples], dtype=ROW)


@dataclass(frozen=True)
class BatchTable:
    """The table of a batch of N samples, and sums over the ranks that hold them."""

    table: np.ndarray
    """[N] of `ROW`, the same on every rank."""

    group: dist.ProcessGroup | None = field(default=None, compare=False)
    """Ranks that together hold every sample once (or more often, if all hold the same ones); None:
    this process holds all."""

    def __len__(self) -> int:
        return len(self.table)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64: prompt and response tokens."""
        return self.table["prompt_length"].astype(np.int64) + self.table["response_length"]

    def packing_lengths(self, sequence_multiple: int) -> np.ndarray:
        """[N] int64: `lengths`, and for samples of several rows what their padding can add, since
        each row is padded to the multiple."""
        return self.lengths + (self.table["rows"] - 1) * (sequence_multiple - 1)

    @property
    def has_trained_tokens(self) -> bool:
        """Whether any sample has a token in the loss."""
        return bool(self.table["trained"].any())

    def lacks(self, name: str) -> bool:
        """Whether any sample has no `rollout_log_probs`, `versions` or `routes`."""
        return not bool(self.table[f"has_{name}"].all())

    def summed(self, values: np.ndarray) -> np.ndarray:
        """The sum over the group of each holder's array [...] of float64 or int64.

        A collective.
        """
        return self._reduced(sum_over_ranks, values)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """The element-wise maximum, as `summed`."""
        return self._reduced(max_over_ranks, values)

    def _reduced(
        self,
        reduce: Callable[[np.ndarray, dist.ProcessGroup | None], np.ndarray],
        values: np.ndarray,
    ) -> np.ndarray:
        return reduce(values, self.group)

    def gather(self, payload: bytes | memoryview) -> list[np.ndarray] | None:
        """Every holder's bytes on the world's rank 0; None elsewhere. A collective of the group."""
        return gather_bytes(payload, self.group)

    def sum(self, *values: float) -> list[float]:
        """The sums of numbers over the group. A collective."""
        return self.summed(np.array(values, dtype=np.float64)).tolist()

    def max(self, *values: float) -> list[float]:
        """The largest of each number over the group; NaN is the largest. A collective."""
        numbers = np.array(values, dtype=np.float64)
        is_nan = np.isnan(numbers)
        # Backends differ in the maximum of a NaN: it is sent as a flag.
        flagged = np.concatenate([np.where(is_nan, -np.inf, numbers), is_nan.astype(np.float64)])
        largest, any_nan = np.split(self.largest(flagged), 2)
        return np.where(any_nan > 0, np.nan, largest).tolist()


@dataclass(frozen=True)
class SampleBatch(BatchTable):
    """N samples as the rollout made them."""

    held: MutableMapping[int, Sample] = field(default_factory=dict)
    """This rank's samples by their position in the table, ascending."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleBatch:
        """Samples that this process holds."""
        return cls(rows_of(samples), held=dict(enumerate(samples)))

    @classmethod
    def gathered(
        cls, samples: Sequence[Sample], places: Sequence[int], group: dist.ProcessGroup | None
    ) -> SampleBatch:
        """Samples of which each rank of the group passes its own, with their positions.

        A collective.
        """
        table = rows_in_place(rows_of(samples, group_rank(group)), places, group)
        held = dict(sorted(zip(map(int, places), samples, strict=True)))
        return cls(table, group, held)

    @property
    def samples(self) -> list[Sample]:
        """This rank's samples, by position."""
        return list(self.held.values())

    def select(self, positions: Sequence[int] | np.ndarray) -> SampleBatch:
        """The samples at these positions, in this order."""
        chosen = enumerate(map(int, positions))
        held = {new: self.held[old] for new, old in chosen if old in self.held}
        table = self.table[np.asarray(positions, dtype=np.int64)]
        return replace(self, table=table, held=held)

    def joined(self, other: SampleBatch) -> SampleBatch:
        """These samples, then the other's, of the same group."""
        more = {len(self) + position: sample for position, sample in other.held.items()}
        group = self.group if len(self) else other.group
        table = np.concatenate([self.table, other.table])
        return SampleBatch(table, group, {**self.held, **more})

    def with_samples(self, samples: Mapping[int, Sample]) -> SampleBatch:
        """Other samples in place of the held ones at these positions. The table stays."""
        return replace(self, held={**self.held, **samples})

    def with_rewards(self, rewards: np.ndarray) -> SampleBatch:
        """Rewards [N] in the table and in the held samples."""
        table = self.table.copy()
        table["reward"] = rewards
        values = table["reward"].tolist()
        held = {i: replace(sample, reward=values[i]) for i, sample in self.held.items()}
        return replace(self, table=table, held=held)

    def shared(self, values: Mapping[int, float]) -> np.ndarray:
        """[N] float64 on every rank from a number for each held sample.

        A collective of the group.
        """
        column = np.zeros(len(self))
        column[list(values)] = list(values.values())
        return self.summed(column)
