"""Training checkpoints in Megatron's distributed format: written whole or not at all, loadable in another layout."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gspo.mcore.checkpoint_files import (
    CheckpointError,
    begin_checkpoint,
    checkpoint_path,
    publish_checkpoint,
    read_state,
    room_left,
)
from megatron_gspo.mcore.forward import unwrap
from megatron_gspo.mcore.policy import Policy

# The one optimizer format that can be loaded in another layout; Megatron's default ties the state to the bucket sizes.
# Expert layers have an optimizer of their own in some layouts only, which may not show in the tensors' names.
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_PR_SET_PDEATHSIG = 1
_NOT_WRITTEN = "checkpoint not written; the last one is untouched"

T = TypeVar("T")


def save_checkpoint(policy: Policy, folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Save model, optimizer, schedule and ``state`` (JSON-able, the same on every rank) as ``folder/step_NNNNNN``.

    Everything is written to a neighbour directory and renamed when all ranks are done. The newest ``keep`` checkpoints
    stay. A collective of all ranks; raises ``CheckpointError`` on every rank if the disk is full or gone.
    """
    final = checkpoint_path(folder, step)
    partial = on_first_rank(lambda: begin_checkpoint(folder, step), _NOT_WRITTEN)
    policy.gather_weights()
    failure = ""
    try:
        with _own_writers():
            dist_checkpointing.save(_content(policy, is_loading=False)[0], str(partial))
    except CheckpointException as error:  # a BaseException
        failure = _reason(error)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    raise_everywhere(failure and failure + room_left(folder), _NOT_WRITTEN)
    on_first_rank(lambda: publish_checkpoint(partial, final, {"step": step, **state}, keep=keep), _NOT_WRITTEN)
    return final


def on_first_rank(action: Callable[[], T], what: str) -> T:
    """The value of ``action`` on every rank; rank 0 runs it while the others wait.

    Its failure is every rank's: ``CheckpointError`` with ``what`` and the reason.
    """
    outcome: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except CheckpointError as error:
            outcome[1] = str(error)
        except Exception as error:
            outcome[1] = f"{what}: {type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1]:
        raise CheckpointError(outcome[1])
    return outcome[0]


def raise_everywhere(failure: str, what: str) -> None:
    """Raise ``CheckpointError`` on every rank with the first rank's ``failure`` that isn't empty."""
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if first := next(filter(None, failures), None):
        raise CheckpointError(f"{what}: {first}")


def _reason(error: BaseException) -> str:
    """One line; a ``CheckpointException``'s own text is the tracebacks of all ranks."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    if not causes:
        return "see another rank's error"
    text = str(causes[0]).strip().splitlines()
    return f"{type(causes[0]).__name__}: {text[0] if text else 'no message'}"


@contextmanager
def _own_writers() -> Iterator[None]:
    """Within the context nothing that Megatron starts to write a checkpoint outlives this rank.

    It hands the writers' results over through a queue in a server process that every rank spawns, which imports the
    whole program again and stays when a rank is killed; a plain queue will do, for only an asynchronous save, which is
    not used here, needs the other. The writers that it forks before 0.19 wait for their parent forever once it is dead.
    """
    queue_before = filesystem_async._results_queue
    writer = filesystem_async.FileSystemWriterAsync
    write_before = inspect.getattr_static(writer, "write_preloaded_data")
    parent, write = os.getpid(), writer.write_preloaded_data

    @functools.wraps(write)
    def write_and_die_with_the_rank(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != parent:
            _die_with(parent)
        return write(*args, **kwargs)

    filesystem_async._results_queue = queue.Queue()
    writer.write_preloaded_data = staticmethod(write_and_die_with_the_rank)
    try:
        yield
    finally:
        filesystem_async._results_queue = queue_before
        writer.write_preloaded_data = write_before


def _die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies; elsewhere nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def load_checkpoint(policy: Policy, path: Path) -> dict[str, Any]:
    """Load model, optimizer and schedule, in whatever layout they were saved; returns the saved ``state``.

    Of optimizer and schedule only what training changes comes from the checkpoint: Adam's moments and the two step
    counts. Learning rates, decay and the length of the schedule are those that ``policy`` was built with. Raises
    ``CheckpointError`` for a checkpoint that can't be read or is of another model.
    """
    try:
        return _load(policy, path)
    except (CheckpointException, Exception) as error:
        other = "to go on from the one before, move it away"
        raise CheckpointError(f"{path} can't be loaded ({_reason(error)}); {other}") from error


def _load(policy: Policy, path: Path) -> dict[str, Any]:
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
