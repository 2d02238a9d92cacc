"""What a rank's part of a checkpoint has; nothing is written."""

from __future__ import annotations

from megatron_gspo.mcore.checkpoint.owned_state import bytes_of, pieces_to_read, pieces_to_write
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.tools.rehearse.records import CheckpointPlan


def plan_checkpoint(policy: Policy) -> CheckpointPlan:
    """What this rank reads, and what it writes: of all replicas it is the one that owns it."""
    pieces = pieces_to_write(policy)
    return CheckpointPlan(len(pieces), bytes_of(pieces_to_read(policy)), bytes_of(pieces))
