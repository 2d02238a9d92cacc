"""`log_probs_from_hidden` with the fields of LogProbOptions as keywords."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gspo.parallel import LogProbOptions, log_probs_from_hidden
from megatron_gspo.parallel.scored_rows import ScoredRows


def call_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    scored: ScoredRows | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    chosen = LogProbOptions(**options) if options else None
    return log_probs_from_hidden(
        hidden,
        weight,
        labels,
        chosen,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        scored=scored,
    )
