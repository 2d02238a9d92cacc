"""Training checkpoints in Megatron's distributed format: atomic, loadable in another parallel layout."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    CheckpointError,
    begin_checkpoint,
    checkpoint_path,
    publish_checkpoint,
    read_state,
    room_left,
)
from megatron_gspo.mcore.checkpoint.checkpoint_writers import Writers, file_jobs
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.parallel.rank_zero import raise_on_every_rank, run_on_rank_zero

# The one optimizer format that can be loaded in another layout; Megatron's default ties the state to the bucket sizes.
# Expert layers have an optimizer of their own in some layouts only, which may not show in the tensors' names.
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_SAVE_KEYWORDS = inspect.signature(dist_checkpointing.save).parameters
# what rank 0 alone writes: the common part (before 0.19), the metadata, the format
_ON_RANK_0 = (
    (getattr(common, "TorchCommonSaveStrategy", None), "save_common"),
    (filesystem_async.FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)
WAITING_WRITERS = 2  # writers per rank of a synchronous save
_NOT_WRITTEN = "checkpoint not written; the last one is untouched"

class AsyncSave:
    """A checkpoint that is written while training continues. Every rank has one; see ``begin_save``.

    ``path``: its directory, temporary until the checkpoint is complete.
    """

    def __init__(self, request: Any, results: queue.Queue[Any], publish: functools.partial[None]) -> None:
        self._request, self._results, self._publish = request, results, publish
        self.path, self._final = publish.args[:2]
        self._staged: Any = request.preload_fn() if request.preload_fn else []  # the children read it, pinned or not
        transforms, use_msc = request.async_fn.args if request.async_fn else ([], False)
        self._writers = Writers(file_jobs(self._staged, transforms, use_msc))
        self._publication: threading.Thread | None = None  # started on rank 0 alone
        self._failures: list[str] = []  # of the publication

    @property
    def writers(self) -> list[int]:
        """Process ids of this rank's writers."""
        return self._writers.pids

    def poll(self) -> bool:
        """Whether the checkpoint is complete and has its final name. Once all ranks' writers are done, this call writes
        the metadata and rank 0 starts to publish it; a later call returns True.

        A collective of all ranks; raises ``CheckpointError`` on all if a writer or the publication failed.
        """
        if self.path == self._final:
            return True
        busy = self._publication.is_alive() if self._publication is not None else not self._writers.poll()
        failure = self._writers.failure or next(iter(self._failures), "")
        state = torch.tensor([float(busy), float(bool(failure))], device=compute_device())
        dist.all_reduce(state)
        anyone_busy, anyone_failed = state.tolist()
        if anyone_failed:
            self.end()
            self._raise(failure)
        if anyone_busy:
            return False
        if self._publication is None:
            self._complete()
            return False
        self.path = self._final
        return True

    def finish(self) -> Path:
        """Wait for the checkpoint and return its path. A collective of all ranks; raises as ``poll``."""
        while self.path != self._final:
            self._wait()
            self.poll()
        return self.path

    def end(self) -> None:
        """Kill this rank's writers and abandon the save, unless it is being published. The next save or start removes
        the temporary directory."""
        self._writers.end()
        self._wait()
        self._staged = []

    def _wait(self) -> None:
        """Wait for this rank's writers and publication."""
        self._writers.poll(timeout=None)
        if self._publication is not None and self._publication.ident is not None:
            self._publication.join()

    def _complete(self) -> None:
        """Write Megatron's metadata, and let rank 0 publish the directory in a thread: flushing it and removing an old
        one take long."""
        self._staged = []
        self._results.put(self._writers.results)
        with _collected_failures() as failures:
            try:
                for function in self._request.finalize_fns:
                    function()
            except (CheckpointException, Exception) as error:
                failures.append(_reason(error))
        self._raise(next(iter(failures), ""))
        self._publication = threading.Thread(target=_collecting(self._publish, self._failures), daemon=True)
        if dist.get_rank() == 0:
            self._publication.start()

    def _raise(self, failure: str) -> None:
        _raise_failure(failure, self._final.parent)


def begin_save(policy: Policy, folder: Path, step: int, state: Mapping[str, Any], *, keep: int,
               check: bool = True, writers: int = 1) -> AsyncSave:
    """Begin to save model, optimizer, schedule and ``state`` (JSON-able, the same on every rank) as they are now.

    The ranks write to a temporary directory. It becomes ``folder/step_NNNNNN`` when the ``AsyncSave`` is polled or
    finished; training may continue meanwhile. The newest ``keep`` checkpoints are kept. Memory: a copy of what this
    rank writes, in host memory, until all is written. At most one save may be in progress. ``check``: verify that the
    ranks' parts cover every tensor, which exchanges metadata; once per layout is enough. ``writers``: processes of this
    rank, one file each; more write faster and take longer to start. A collective of all ranks; raises
    ``CheckpointError`` on every rank if the disk is full or unavailable.
    """
    final = checkpoint_path(folder, step)
    text, partial = run_on_rank_zero(
        lambda: (_encode({"step": step, **state}), begin_checkpoint(folder, step)),
        error=CheckpointError, what=_NOT_WRITTEN,
    )
    policy.memory.restore()
    policy.gather_weights()
    save, results = None, queue.Queue[Any]()
    with _collected_failures() as failures:
        try:
            with _results_in(results), _frozen_garbage():
                request = _plan(checkpoint_content(policy, is_loading=False)[0], partial, check, writers)
            publish = functools.partial(publish_checkpoint, partial, final, json.loads(text), keep=keep)
            save = AsyncSave(request, results, publish)
        except (CheckpointException, Exception) as error:  # the first is a BaseException
            failures.append(_reason(error))
    failure = next(iter(failures), "")
    try:
        _raise_failure(failure, folder)
    except CheckpointError:
        if save is not None:
            save.end()
        raise
    assert save is not None
    return save


def save_checkpoint(policy: Policy, folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """``begin_save`` and wait; returns the checkpoint's path."""
    return begin_save(policy, folder, step, state, keep=keep, writers=WAITING_WRITERS).finish()


def _plan(content: dict[str, Any], folder: Path, check: bool, writers: int) -> Any:
    """Megatron's request for an asynchronous save: functions that stage the tensors, write them and finish the save."""
    keywords = {"async_strategy": "mcore"} if "async_strategy" in _SAVE_KEYWORDS else {}
    return dist_checkpointing.save(
        content, str(folder), async_sharded_save=True, validate_access_integrity=check,
        sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=writers), **keywords
    )


def _raise_failure(failure: str, folder: Path) -> None:
    """Raise ``CheckpointError`` on every rank if any rank has a failure. A collective of all ranks."""
    raise_on_every_rank(failure and f"{_NOT_WRITTEN}: {failure}{room_left(folder)}", CheckpointError)


def _encode(state: Mapping[str, Any]) -> str:
    """The state as JSON; ``CheckpointError`` where it has no such form."""
    try:
        return json.dumps(state)
    except TypeError as error:
        raise CheckpointError(f"{_NOT_WRITTEN}: {error}") from error


def _reason(error: BaseException) -> str:
    """One line; a ``CheckpointException``'s own text is the tracebacks of all ranks."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    if not causes:
        return "see another rank's error"
    text = str(causes[0]).strip().splitlines()
    return f"{type(causes[0]).__name__}: {text[0] if text else 'no message'}"


@contextmanager
def _results_in(results: queue.Queue[Any]) -> Iterator[None]:
    """Within the context Megatron reads the results of its storage writers from ``results``.

    Its own queue needs a server process per rank, which imports the whole program and outlives a killed rank.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = results
    try:
        yield
    finally:
        filesystem_async._results_queue = before


@contextmanager
def _collected_failures() -> Iterator[list[str]]:
    """Within the context errors of what Megatron writes on rank 0 only are collected, not raised: the other ranks would
    wait in the next collective. Yields the list of failures."""
    failures: list[str] = []
    with ExitStack() as stack:
        for owner, name in _ON_RANK_0:
            function = getattr(owner, name, None)
            if function is not None:
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, _collecting(function, failures))
        yield failures


def _collecting(function: Callable[..., Any], failures: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def collecting(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failures.append(_reason(error))

    return collecting


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Exclude older objects from garbage collection, which Megatron runs for each optimizer that it saves or loads."""
    if gc.get_freeze_count():  # frozen by the caller
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def load_checkpoint(policy: Policy, path: Path) -> dict[str, Any]:
    """Load model, optimizer and schedule, saved in any parallel layout; returns the saved ``state``.

    From the optimizer's and schedule's state only Adam's moments and the two step counts are loaded. Learning rates,
    decay and the length of the schedule are those that ``policy`` was built with. Raises ``CheckpointError`` for a
    checkpoint that can't be read or is of another model.
    """
    try:
        with _frozen_garbage():
            return _load(policy, path)
    except (CheckpointException, Exception) as error:
        other = "to resume from the one before, move it away"
        raise CheckpointError(f"{path} can't be loaded ({_reason(error)}); {other}") from error


def _load(policy: Policy, path: Path) -> dict[str, Any]:
    policy.memory.restore()
    content, rest = checkpoint_content(policy, is_loading=True)
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


def checkpoint_content(policy: Policy, *, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a checkpoint, and the rest of the optimizer's state.

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
    """Adam's step count. Transformer Engine stores it in the parameter group, torch by parameter."""
    steps = [group["step"] for part in _parts(rest) for group in part["param_groups"] if "step" in group]
    steps += [part["state"]["common_step"] for part in _parts(rest) if "common_step" in part.get("state", {})]
    return int(max(steps, default=0))
