"""Training checkpoints in Megatron's distributed format: written whole or not at all, loadable in another layout."""

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
WAITING_WRITERS = 2  # of a save that somebody waits for
_NOT_WRITTEN = "checkpoint not written; the last one is untouched"

class Save:
    """A checkpoint that is being written while training goes on. Every rank has one; see ``begin_save``.

    ``path``: where it lies now, under its own name once it is whole.
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
        """Whether the checkpoint is whole and has its name. Once all ranks' writers are done it is completed here, and
        rank 0 begins to publish it; a later call finds it there.

        A collective of all ranks, of two numbers but for the one that completes it; raises ``CheckpointError`` on all
        if a writer or the publication failed.
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
        """Wait for it; the checkpoint's own path. A collective of all ranks, raises as ``poll``."""
        while self.path != self._final:
            self._wait()
            self.poll()
        return self.path

    def end(self) -> None:
        """Give it up, unless it is being published: this rank's writers are ended. The next save or start removes what
        they have written."""
        self._writers.end()
        self._wait()
        self._staged = []

    def _wait(self) -> None:
        """Until this rank is done with what it does now."""
        self._writers.poll(timeout=None)
        if self._publication is not None and self._publication.ident is not None:
            self._publication.join()

    def _complete(self) -> None:
        """Add Megatron's metadata, and have rank 0 publish the directory: to flush it and to remove an old one takes
        the file system's time, not the loop's."""
        self._staged = []
        self._results.put(self._writers.results)
        with _in_step() as failures:
            try:
                for function in self._request.finalize_fns:
                    function()
            except (CheckpointException, Exception) as error:
                failures.append(_reason(error))
        self._raise(next(iter(failures), ""))
        self._publication = threading.Thread(target=_noting(self._publish, self._failures), daemon=True)
        if dist.get_rank() == 0:
            self._publication.start()

    def _raise(self, failure: str) -> None:
        _raise_failure(failure, self._final.parent)


def begin_save(policy: Policy, folder: Path, step: int, state: Mapping[str, Any], *, keep: int,
               check: bool = True, writers: int = 1) -> Save:
    """Begin to save model, optimizer, schedule and ``state`` (JSON-able, the same on every rank) as they are now.

    The checkpoint ``folder/step_NNNNNN`` appears when the ``Save`` is polled or finished after all ranks have written
    their parts to a neighbour directory; training may go on meanwhile. The newest ``keep`` checkpoints stay. Memory: a
    copy of what this rank writes, in host memory, until then. At most one may be under way. ``check``: that the ranks'
    parts make up the whole, for which every rank needs to know all; once is enough for a layout. ``writers``: processes
    of this rank, each with a file of its own; more write faster and take longer to start. A collective of all ranks;
    raises ``CheckpointError`` on every rank if the disk is full or gone.
    """
    final = checkpoint_path(folder, step)
    text, partial = run_on_rank_zero(
        lambda: (_encode({"step": step, **state}), begin_checkpoint(folder, step)),
        error=CheckpointError, what=_NOT_WRITTEN,
    )
    policy.gather_weights()
    save, results = None, queue.Queue[Any]()
    with _in_step() as failures:
        try:
            with _results_through(results), _few_to_collect():
                request = _plan(_content(policy, is_loading=False)[0], partial, check, writers)
            publish = functools.partial(publish_checkpoint, partial, final, json.loads(text), keep=keep)
            save = Save(request, results, publish)
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
    """``begin_save``, and wait for it: the checkpoint's path."""
    return begin_save(policy, folder, step, state, keep=keep, writers=WAITING_WRITERS).finish()


def _plan(content: dict[str, Any], folder: Path, check: bool, writers: int) -> Any:
    """Megatron's request for an asynchronous save: what stages the tensors, what writes them, what ends the save."""
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
def _results_through(results: queue.Queue[Any]) -> Iterator[None]:
    """Within the context Megatron's storage writers expect the results of their writers in ``results``.

    Its own queue lives in a server process that every rank spawns, which imports the whole program again and stays when
    a rank is killed.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = results
    try:
        yield
    finally:
        filesystem_async._results_queue = before


@contextmanager
def _in_step() -> Iterator[list[str]]:
    """Within the context what Megatron writes on rank 0 alone doesn't raise there: the other ranks would wait for it in
    the next collective. Yields the list of what went wrong."""
    failures: list[str] = []
    with ExitStack() as stack:
        for owner, name in _ON_RANK_0:
            function = getattr(owner, name, None)
            if function is not None:
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, _noting(function, failures))
        yield failures


def _noting(function: Callable[..., Any], failures: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failures.append(_reason(error))

    return noting


@contextmanager
def _few_to_collect() -> Iterator[None]:
    """Megatron collects garbage for each optimizer that it saves or loads: let it look at what has come since only."""
    if gc.get_freeze_count():  # somebody else has frozen what is old
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def load_checkpoint(policy: Policy, path: Path) -> dict[str, Any]:
    """Load model, optimizer and schedule, in whatever layout they were saved; returns the saved ``state``.

    Of optimizer and schedule only what training changes comes from the checkpoint: Adam's moments and the two step
    counts. Learning rates, decay and the length of the schedule are those that ``policy`` was built with. Raises
    ``CheckpointError`` for a checkpoint that can't be read or is of another model.
    """
    try:
        with _few_to_collect():
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
