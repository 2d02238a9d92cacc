"""A value head in place of a model's output layer, and the values of a micro-batch's tokens."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.parallel.scored_rows import ScoredRows


class ValueHead(nn.Module):
    """One value of a position's hidden state: ``weight`` [1, hidden], replicated over the
    tensor-parallel ranks.

    It starts at 0, so that a new value model predicts 0 everywhere.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees its own tokens: Megatron adds these gradients
        # over the ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def token_values(
    head: ValueHead,
    hidden: Tensor,
    scored: ScoredRows,
    groups: ProcessGroups,
    *,
    sequence_parallel: bool,
) -> Tensor:
    """The values of a shard's positions from the last stage's hidden states ``[t, h]`` (``[t / tp,
    h]`` under sequence parallelism): ``[t]``, float32 or float64, 0 where ``scored`` leaves a
    position out."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows = scored.select_own(hidden).to(dtype)
    values = rows @ head.weight.to(dtype).squeeze(0)
    count = len(hidden)
    if sequence_parallel:
        count *= groups.tp.size()
        # every rank computes the whole loss from the gathered values: no sum in the backward pass
        values = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=groups.tp
        )
    values = scored.select_gathered(values[:, None]).squeeze(1)
    return values.new_zeros(count).index_copy(0, scored.positions, values)
