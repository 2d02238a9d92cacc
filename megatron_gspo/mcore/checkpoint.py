"""Training checkpoints in Megatron's distributed format: written whole or not at all, loadable in another layout."""

from __future__ import annotations

import json
import os
import queue
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gspo.mcore.forward import unwrap
from megatron_gspo.mcore.policy import Policy

# The one optimizer format that can be loaded in another layout; Megatron's default ties the state to the bucket sizes.
# Expert layers have an optimizer of their own in some layouts only, which may not show in the tensors' names.
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_STATE = "state.json"  # written last: a directory without it is not a checkpoint


def save_checkpoint(policy: Policy, folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Save model, optimizer, schedule and ``state`` (JSON-able, the same on every rank) as ``folder/step_NNNNNN``.

    Everything is written to a neighbour directory and renamed when all ranks are done. The newest ``keep`` checkpoints
    stay. A collective of all ranks; raises ``RuntimeError`` on every rank if the disk is full or gone.
    """
    final = folder / f"step_{step:06d}"
    partial = folder / f".partial_{step:06d}"
    _on_first_rank(lambda: _make_empty(partial))
    failure = ""
    try:
        with _results_in_process():
            dist_checkpointing.save(_content(policy, is_loading=False)[0], str(partial))
    except CheckpointException as error:  # a BaseException; its own text is the tracebacks of all ranks
        failure = next((str(cause) for cause, _ in error.failures.values()), "see another rank's error")
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    _raise_everywhere(failure)
    _on_first_rank(lambda: _publish(partial, final, {"step": step, **state}, keep))
    return final


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(partial: Path, final: Path, state: Mapping[str, Any], keep: int) -> None:
    (partial / _STATE).write_text(json.dumps(state))
    _remove(final)
    os.replace(partial, final)
    for old in complete_checkpoints(final.parent)[:-keep]:
        _remove(old)


def _remove(checkpoint: Path) -> None:
    (checkpoint / _STATE).unlink(missing_ok=True)  # first, so that a half removed one doesn't look complete
    shutil.rmtree(checkpoint, ignore_errors=True)


def _on_first_rank(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the others wait; its failure is every rank's failure."""
    failure = ""
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    _raise_everywhere(failure)


def _raise_everywhere(failure: str) -> None:
    """Raise ``RuntimeError`` on every rank with the first rank's ``failure`` that isn't empty."""
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if first := next(filter(None, failures), None):
        raise RuntimeError(f"checkpoint not written; the last one is untouched: {first}")


@contextmanager
def _results_in_process() -> Iterator[None]:
    """Within the context Megatron hands the results of its writers over through a plain queue.

    Its own queue lives in a server process that every rank spawns, which imports the whole program again and outlives
    a rank that is killed. Only an asynchronous save, which is not used here, needs it.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that were written to their end, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / _STATE).is_file())


def read_state(path: Path) -> dict[str, Any]:
    """The ``state`` that a checkpoint was saved with, and its ``step``."""
    return dict(json.loads((path / _STATE).read_text()))


def load_checkpoint(policy: Policy, path: Path) -> dict[str, Any]:
    """Load model, optimizer and schedule, in whatever layout they were saved; returns the saved ``state``.

    Of optimizer and schedule only what training changes comes from the checkpoint: Adam's moments and the two step
    counts. Learning rates, decay and the length of the schedule are those that ``policy`` was built with.
    """
    content, rest = _content(policy, is_loading=True)
    loaded = dist_checkpointing.load(content, str(path))
    for i, chunk in enumerate(policy.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{i}"])
    optimizer = merge(rest, loaded["optimizer"])
    for part in _parts(optimizer):
        for group in part["param_groups"]:
            group["step"] = loaded["optimizer_step"]
        if "state" in part:
            part["state"]["common_step"] = torch.tensor(float(loaded["optimizer_step"]))
    policy.optimizer.load_state_dict(optimizer)
    policy.scheduler.num_steps = 0
    policy.scheduler.step(loaded["schedule_step"])
    return read_state(path)


def _content(policy: Policy, *, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint holds, and the rest of the optimizer's state.

    The rest depends on the layout: how many optimizers Megatron chains, and which parameter groups each has.
    """
    models = {f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(policy.chunks)}
    # with several chunks Megatron's optimizer expects them under these very keys
    weights = models if len(models) > 1 else models["model0"]
    optimizer = policy.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_FORMAT)
    stored = (ShardedBase, LocalNonpersistentObject)
    moments, rest = extract_matching_values(optimizer, lambda value: isinstance(value, stored))
    steps = {"optimizer_step": _optimizer_step(rest), "schedule_step": policy.scheduler.num_steps}
    return {**models, "optimizer": moments, **({} if is_loading else steps)}, rest


def _parts(optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
    """The torch state of each optimizer that Megatron chains; a single one isn't nested, nor is one of float32."""
    chained = [optimizer] if {"optimizer", "param_groups"} & set(optimizer) else list(optimizer.values())
    return [part.get("optimizer", part) for part in chained]


def _optimizer_step(rest: dict[str, Any]) -> int:
    """How often Adam has stepped: Transformer Engine counts in the parameter group, torch by parameter."""
    steps = [group["step"] for part in _parts(rest) for group in part["param_groups"] if "step" in group]
    steps += [part["state"]["common_step"] for part in _parts(rest) if "common_step" in part.get("state", {})]
    return int(max(steps, default=0))
