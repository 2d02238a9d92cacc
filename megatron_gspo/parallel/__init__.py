"""Vocabulary-parallel log-probabilities, context-parallel ownership of tokens, reduction of
metrics.

Imports torch and torch.distributed only. Process groups are arguments; ``None`` is a group of one
process.
"""

from megatron_gspo.parallel.context_parallel import all_gather_tokens, sum_over, zigzag_indices
from megatron_gspo.parallel.log_probs import LogProbOptions, log_probs_from_hidden
from megatron_gspo.parallel.metric_reduction import reduce_metrics
from megatron_gspo.parallel.scored_rows import ScoredRows

__all__ = [
    "LogProbOptions",
    "ScoredRows",
    "all_gather_tokens",
    "log_probs_from_hidden",
    "reduce_metrics",
    "sum_over",
    "zigzag_indices",
]
