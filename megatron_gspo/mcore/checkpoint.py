"""Training checkpoints in Megatron's distributed format: written whole or not at all, loadable in another layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_gspo.mcore.forward import unwrap
from megatron_gspo.mcore.policy import Policy

# The one optimizer format that can be loaded in another layout; Megatron's default ties the state to the bucket sizes.
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
_STATE = "state.json"  # written last: a directory without it is not a checkpoint


def save_checkpoint(policy: Policy, folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Save model, optimizer, schedule and ``state`` (JSON-able, the same on every rank) as ``folder/step_NNNNNN``.

    Everything is written to a neighbour directory and renamed when all ranks are done. The newest ``keep`` checkpoints
    stay. A collective of all ranks; raises ``RuntimeError`` on every rank if the disk is full or gone.
    """
    final = folder / f"step_{step:06d}"
    partial = folder / f".partial_{step:06d}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(policy, is_loading=False), str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / _STATE).write_text(json.dumps({"step": step, **state}))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that were written to their end, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / _STATE).is_file())


def read_state(path: Path) -> dict[str, Any]:
    """The ``state`` that a checkpoint was saved with, and its ``step``."""
    return dict(json.loads((path / _STATE).read_text()))


def load_checkpoint(policy: Policy, path: Path) -> dict[str, Any]:
    """Load model, optimizer and schedule, in whatever layout they were saved; returns the saved ``state``."""
    loaded = dist_checkpointing.load(_sharded(policy, is_loading=True), str(path))
    for i, chunk in enumerate(policy.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{i}"])
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    return read_state(path)


def _sharded(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    models = {f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(policy.chunks)}
    # with several chunks Megatron's optimizer expects them under these very keys
    weights = models if len(models) > 1 else models["model0"]
    optimizer = policy.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_FORMAT)
    return {**models, "optimizer": optimizer, "scheduler": policy.scheduler.state_dict()}
