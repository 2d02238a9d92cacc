"""What a rank's part of a checkpoint has, from Megatron's sharded state dict; nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_gspo.mcore.checkpoint.save_load import checkpoint_content
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.tools.rehearse.records import CheckpointPlan


def plan_checkpoint(policy: Policy) -> CheckpointPlan:
    """The tensors of this rank's state, and those that it is the one of all replicas to write."""
    content = checkpoint_content(policy, is_loading=False)[0]
    tensors = list(_sharded(content))
    return CheckpointPlan(
        tensors=len(tensors),
        bytes=sum(_bytes(tensor) for tensor in tensors),
        written=sum(_bytes(tensor) for tensor in tensors if _is_main(tensor.replica_id)),
    )


def _sharded(value: Any) -> Iterator[Any]:
    """Megatron's sharded tensors within dicts and lists."""
    if hasattr(value, "replica_id"):
        if isinstance(getattr(value, "data", None), Tensor):
            yield value
        return
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _sharded(item)


def _bytes(sharded: Any) -> int:
    return sharded.data.numel() * sharded.data.element_size()


def _is_main(replica: Any) -> bool:
    return all(number == 0 for number in replica) if isinstance(replica, tuple) else replica == 0
