"""From tokens to one number: segment sums and the weight of each token in a mini-batch's objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective


def segment_sums(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum `values` [T] by sequence: [num_segments] float64.

    float64 because a GSPO log-ratio is a small difference of large sums next to a clip of 3e-4, and so that
    the order in which a GPU adds does not show in the float32 result.
    """
    zeros = torch.zeros(num_segments, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, segment_ids, values.double())


@dataclass(frozen=True)
class Shares:
    """What one token counts for in the global mini-batch; 0 where it is not trained. [T], no gradient.

    Attributes:
        of_tokens: 1 / num_tokens: adding it up over all ranks and micro-batches gives 1.
        of_sequences: 1 / (num_sequences * |y_i|): likewise, and a sequence that spans context ranks is
            counted once, each rank holding the part n_owned / |y_i| of it.
        of_objective: the weight in the objective, by the aggregation.
    """

    of_tokens: Tensor
    of_sequences: Tensor
    of_objective: Tensor


def token_shares(
    objective: Objective,
    mask: Tensor,
    lengths: Tensor,
    num_sequences: int | Tensor,
    num_tokens: int | Tensor,
) -> Shares:
    """Shares of the tokens of `mask` [T] bool; `lengths` [T] is |y_i| of each one's sequence over all ranks.

    Sequences with no trained token have length 0 and only shares of 0, never a division by 0.
    """
    trained = mask.to(lengths.dtype)
    of_tokens = trained / num_tokens
    of_sequences = trained / (lengths.clamp_min(1) * num_sequences)
    if objective.aggregation == "sequence_mean":
        of_objective = of_sequences
    elif objective.aggregation == "token_mean":
        of_objective = of_tokens
    else:
        assert objective.constant_length is not None  # Objective refuses to be built otherwise
        of_objective = trained / (num_sequences * objective.constant_length)
    return Shares(of_tokens, of_sequences, of_objective)
