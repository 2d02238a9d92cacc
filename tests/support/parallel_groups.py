"""Several layouts one after the other in the same processes, which spares their start."""

from __future__ import annotations

from megatron.core import parallel_state

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.process_groups import ProcessGroups, initialize


def groups_of(layout: ParallelConfig) -> ProcessGroups:
    """The groups of ``layout``; those of this process's earlier layout are taken down first."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return initialize(layout, seed=3)
