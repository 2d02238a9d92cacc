"""A rollout batch over ranks: a row of numbers for each sample on every rank, and the samples that
this rank holds.

Decisions (advantages, filters, mini-batches, packing) are functions of the rows, so every rank
makes the same ones. Tokens, log-probs, masks and routes are on the ranks that train the sample; of
a pipeline, each stage has what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.sample import FINISH_REASONS, Sample
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.parallel.collectives import group_rank, group_size
from megatron_gspo.parallel.host_exchange import (
    broadcast_array,
    broadcast_bytes,
    exchange_bytes,
    gather_bytes,
    max_over_ranks,
    rows_in_place,
    sum_over_ranks,
)

# Tokens whose temporaries stay in a core's cache; new memory for more costs as much as the work.
_PIECE = 1 << 16

ROW = np.dtype(
    [
        ("prompt_index", np.int64),
        ("reward", np.float64),
        ("sample_index", np.int32),
        ("prompt_length", np.int32),
        ("response_length", np.int32),
        ("trained", np.int32),  # tokens in the loss
        ("oldest_version", np.int32),
        ("newest_version", np.int32),
        ("turns", np.int32),  # of an episode; 0 for a single-turn sample
        ("turn_tokens", np.int32),  # tokens of its turns
        ("holder", np.int32),  # rank in `SampleBatch.group`
        ("finish", np.uint8),  # position in FINISH_REASONS
        ("has_rollout_log_probs", np.bool_),
        ("has_versions", np.bool_),
        ("has_routes", np.bool_),
    ]
)
"""What every rank holds of a sample: 56 bytes."""


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
class SampleBatch:
    """N samples.

    table: [N] of `ROW`, the same on every rank. held: this rank's samples by their position in the
    table, ascending. group: ranks that together hold every sample once (or more often, if all hold
    the same ones); None: this process holds all. pipeline: the stages of a replica where only the
    last one holds its samples; the others have `stage_inputs` of them in place of `held`. None:
    every stage holds them.
    """

    table: np.ndarray
    held: MutableMapping[int, Sample]
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    pipeline: dist.ProcessGroup | None = field(default=None, compare=False)
    stage_inputs: Mapping[int, Sample] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleBatch:
        """Samples that this process holds."""
        return cls(rows_of(samples), dict(enumerate(samples)))

    @classmethod
    def gathered(
        cls, samples: Sequence[Sample], places: Sequence[int], group: dist.ProcessGroup | None
    ) -> SampleBatch:
        """Samples of which each rank of the group passes its own, with their positions.

        A collective.
        """
        table = rows_in_place(rows_of(samples, group_rank(group)), places, group)
        held = dict(sorted(zip(map(int, places), samples, strict=True)))
        return cls(table, held, group)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def samples(self) -> list[Sample]:
        """This rank's samples, by position."""
        return list(self.held.values())

    @property
    def packed(self) -> Mapping[int, Sample]:
        """What this rank feeds its model: `held`, or on other than the last stage the
        `stage_inputs`.
        """
        return self.held if self._is_last_stage else self.stage_inputs

    @property
    def _is_last_stage(self) -> bool:
        return self.pipeline is None or group_rank(self.pipeline) == group_size(self.pipeline) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64: prompt and response tokens."""
        return self.table["prompt_length"].astype(np.int64) + self.table["response_length"]

    @property
    def has_trained_tokens(self) -> bool:
        """Whether any sample has a token in the loss."""
        return bool(self.table["trained"].any())

    def lacks(self, name: str) -> bool:
        """Whether any sample has no `rollout_log_probs`, `versions` or `routes`."""
        return not bool(self.table[f"has_{name}"].all())

    def select(self, positions: Sequence[int] | np.ndarray) -> SampleBatch:
        """The samples at these positions, in this order."""
        chosen = list(enumerate(map(int, positions)))
        held, inputs = (
            {new: of[old] for new, old in chosen if old in of}
            for of in (self.held, self.stage_inputs)
        )
        table = self.table[np.asarray(positions, dtype=np.int64)]
        return replace(self, table=table, held=held, stage_inputs=inputs)

    def pieces(self) -> Iterator[SampleBatch]:
        """This rank's samples in parts of about `_PIECE` tokens, for work on all tokens; at least
        one, perhaps empty."""
        piece: dict[int, Sample] = {}
        tokens = 0
        for position, sample in self.held.items():
            if piece and tokens + sample.length > _PIECE:
                yield replace(self, held=piece)
                piece = {}
                tokens = 0
            piece[position] = sample
            tokens += sample.length
        yield replace(self, held=piece)

    def joined(self, other: SampleBatch) -> SampleBatch:
        """These samples, then the other's, of the same group; each stage holds them."""
        more = {len(self) + position: sample for position, sample in other.held.items()}
        group = self.group if len(self) else other.group
        return SampleBatch(np.concatenate([self.table, other.table]), {**self.held, **more}, group)

    def map(self, change: Callable[[int, Sample], Sample]) -> SampleBatch:
        """`change(position, sample)` in place of each held sample.

        The table stays: see `with_trained`.
        """
        return replace(self, held={i: change(i, sample) for i, sample in self.held.items()})

    def map_packed(self, change: Callable[[int, Sample], Sample]) -> SampleBatch:
        """`map` of `packed`: for masks and routes, which every pipeline stage has."""
        changed = {i: change(i, sample) for i, sample in self.packed.items()}
        return (
            replace(self, held=changed)
            if self._is_last_stage
            else replace(self, stage_inputs=changed)
        )

    def with_columns(self, **columns: np.ndarray) -> SampleBatch:
        """Columns [N] of the table replaced; the held samples' rewards follow that column."""
        table = self.table.copy()
        for name, values in columns.items():
            table[name] = values
        if "reward" not in columns:
            return replace(self, table=table)
        rewards = table["reward"].tolist()
        held = {i: _rewarded(sample, rewards[i]) for i, sample in self.held.items()}
        return replace(self, table=table, held=held)

    def with_trained(self) -> SampleBatch:
        """The table's `trained` counted again from the held samples' loss masks, which the other
        pipeline stages get. A collective of the replicas."""
        counted = self.with_columns(
            trained=self.shared({i: int(s.loss_mask.sum()) for i, s in self.held.items()})
        )
        if self.pipeline is None:
            return counted
        own = np.concatenate([s.loss_mask for s in self.held.values()] or [np.zeros(0, dtype=bool)])
        sent = broadcast_bytes(np.packbits(own), self.pipeline, group_size(self.pipeline) - 1)
        ends = np.cumsum([sample.response_length for sample in self.packed.values()])
        masks = np.split(
            np.unpackbits(sent, count=int(ends[-1]) if len(ends) else 0).view(bool), ends[:-1]
        )
        loss_masks = dict(zip(self.packed, masks, strict=False))
        return counted.map_packed(lambda i, sample: replace(sample, loss_mask=loss_masks[i]))

    def shared(self, values: Mapping[int, float]) -> np.ndarray:
        """[N] float64 on every rank from a number for each held sample.

        A collective of the replicas.
        """
        column = np.zeros(len(self))
        column[list(values)] = list(values.values())
        return self.summed(column)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """The sum over the replicas of each holder's array [...] of float64 or int64.

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
        reduced = reduce(values, self.group) if self._is_last_stage else values
        return (
            reduced
            if self.pipeline is None
            else broadcast_array(reduced, self.pipeline, group_size(self.pipeline) - 1)
        )

    def gather(self, payload: bytes | memoryview) -> list[np.ndarray] | None:
        """Every holder's bytes on the world's rank 0; None elsewhere. A collective of the
        replicas.
        """
        if self.pipeline is not None:  # to the first stage
            last = group_size(self.pipeline) - 1
            sent = exchange_bytes(
                {0: payload} if self._is_last_stage else {}, [(last, 0)], self.pipeline
            )
            payload = sent[last].data if sent else b""
        return gather_bytes(payload, self.group)

    def sum(self, *values: float) -> list[float]:
        """The sums of numbers over the replicas. A collective."""
        return self.summed(np.array(values, dtype=np.float64)).tolist()

    def max(self, *values: float) -> list[float]:
        """The largest of each number over the replicas; NaN is the largest. A collective."""
        given = np.array(values, dtype=np.float64)
        flagged = np.concatenate(
            [np.where(np.isnan(given), -np.inf, given), np.isnan(given).astype(np.float64)]
        )
        largest, is_nan = np.split(self.largest(flagged), 2)
        return np.where(is_nan > 0, np.nan, largest).tolist()


def _rewarded(sample: Sample, reward: float) -> Sample:
    same = sample.reward == reward or (sample.reward != sample.reward and reward != reward)
    return sample if same else replace(sample, reward=reward)
