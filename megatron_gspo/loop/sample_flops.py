"""What the passes over each sample of a rollout batch cost, from which a step is planned and its
throughput known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.models.flops import ForwardFlops, Recompute, forward_flops
from megatron_gspo.models.model_shape import ModelShape


@dataclass(frozen=True)
class SampleFlops:
    """Arrays [N], the same on every rank."""

    scored: np.ndarray
    """Positions that a pass scores."""

    forward: np.ndarray
    """FLOPs of a pass without a gradient."""

    trained: np.ndarray
    """Of an update, each product once."""

    recomputed: np.ndarray
    """Of what an update computes again."""

    @property
    def costs(self) -> np.ndarray:
        """int64, by which a step is balanced: 1000 FLOPs of a pass without a gradient."""
        return np.maximum(self.forward / 1000, 1).astype(np.int64)


def sample_flops(
    batch: SampleBatch, shape: ModelShape, *, frozen: bool = False, recompute: Recompute = "none"
) -> SampleFlops:
    """The FLOPs of each sample. A collective of the batch's group where a sample has several rows,
    whose lengths only its holder knows.

    frozen, recompute: as of `ForwardFlops`.
    """

    def of_passes(forward: ForwardFlops) -> np.ndarray:
        """[3, n] float64."""
        return np.stack(
            [forward.total, forward.training(frozen=frozen), forward.recomputed(recompute)]
        )

    table = batch.table
    scored = np.where(table["turns"] > 0, table["turn_tokens"], table["response_length"])
    flops = of_passes(forward_flops(shape, batch.lengths, scored))
    several = table["rows"] > 1
    if several.any():
        of_rows = np.zeros_like(flops)
        rows_of = {
            position: sample.row_lengths
            for position, sample in batch.held.items()
            if sample.row_lengths is not None
        }
        if rows_of:
            positions = list(rows_of)
            lengths = np.concatenate(list(rows_of.values()))
            first_rows = np.cumsum([0, *map(len, rows_of.values())])[:-1]
            scored_of_row = np.zeros(len(lengths))
            scored_of_row[first_rows] = scored[positions]  # in which row does not matter
            flops_of_row = of_passes(forward_flops(shape, lengths, scored_of_row))
            of_rows[:, positions] = np.add.reduceat(flops_of_row, first_rows, axis=1)
        flops = np.where(several, batch.largest(of_rows), flops)
    return SampleFlops(scored, *flops)
