"""Training checkpoints in Megatron's distributed format: atomic, and each rank writes and reads
only what it owns.

A save copies this rank's values into host memory (`FileImage`), and a thread writes them as one
file. Nothing is gathered: the file's index, a small file beside it, is joined to the checkpoint's
by rank 0 when all ranks are done.
"""

from __future__ import annotations

import functools
import gc
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_gspo.errors import first_line
from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    CheckpointError,
    begin_checkpoint,
    check_base,
    checkpoint_path,
    publish_checkpoint,
    read_state,
    room_left,
)
from megatron_gspo.mcore.checkpoint.checkpoint_metadata import write_metadata_files
from megatron_gspo.mcore.checkpoint.file_image import FileImage, Job
from megatron_gspo.mcore.checkpoint.metadata_file import (
    read_index,
    write_index,
    write_metadata_file,
)
from megatron_gspo.mcore.checkpoint.owned_state import (
    Piece,
    make_state,
    optimizer_numbers,
    pieces_to_read,
    pieces_to_write,
    set_optimizer_numbers,
    stored_objects,
)
from megatron_gspo.mcore.checkpoint.read_pieces import MismatchError, read_pieces, read_steps
from megatron_gspo.mcore.optimizer_state import STEP
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.parallel.rank_zero import raise_on_every_rank, run_on_rank_zero

_NOT_WRITTEN = "checkpoint not written; the last one is untouched"
_PATIENCE = 10.0  # seconds until an abandoned save must have ended


class AsyncSave:
    """A checkpoint that is written while training continues. Every rank has one; see
    ``begin_save``.

    ``path``: its directory, temporary until the checkpoint is complete. ``image``: the memory it is
    staged in.
    """

    def __init__(
        self, image: FileImage, partial: Path, publish: Callable[[], None], final: Path
    ) -> None:
        self.path = partial
        self.image = image
        self._final = final
        self._publish = publish
        self._stop = threading.Event()
        self._job = Job(lambda: _write(image, partial, self._stop), _reason)
        self._is_publishing = False  # on every rank; only rank 0 has a job then

    def poll(self) -> bool:
        """Whether the checkpoint is complete and has its final name. Once all ranks have written,
        this call lets rank 0 publish it; a later call returns True.

        A collective of all ranks; raises ``CheckpointError`` on all if one failed.
        """
        if self.path == self._final:
            return True
        busy = not self._job.is_over()
        failure = "" if busy else self._job.failure
        state = torch.tensor([float(busy), float(bool(failure))], device=compute_device())
        dist.all_reduce(state)
        anyone_busy, anyone_failed = state.tolist()
        if anyone_failed:
            self.end()
            _raise_failure(failure, self._final.parent)
        if anyone_busy:
            return False
        if not self._is_publishing:
            self._is_publishing = True
            if dist.get_rank() == 0:
                self._job = Job(self._publish, _reason)
            return False
        self.path = self._final
        return True

    def finish(self) -> Path:
        """Wait for the checkpoint and return its path.

        A collective of all ranks; raises as ``poll``.
        """
        while self.path != self._final:
            self._job.is_over(timeout=None)
            self.poll()
        return self.path

    def end(self) -> None:
        """Abandon the save, unless it is being published.

        The next save or start removes the temporary directory.
        """
        self._stop.set()
        self._job.is_over(timeout=None if self._is_publishing else _PATIENCE)


def make_image(policy: Policy) -> FileImage:
    """The host memory in which this rank's saves are staged: of the size of what it owns of
    weights and optimizer.
    """
    for model in policy.trained.values():
        model.memory.restore()
    return FileImage(
        f"__{dist.get_rank()}_0.distcp",
        pieces_to_write(policy),
        stored_objects(policy),
        _stepped(policy),
    )


def begin_save(
    policy: Policy,
    folder: Path,
    step: int,
    state: Mapping[str, object],
    *,
    keep: int,
    image: FileImage | None = None,
) -> AsyncSave:
    """Begin to save models, optimizers, schedules and ``state`` (JSON-able, the same on every rank)
    as they are now.

    The ranks write to a temporary directory. It becomes ``folder/step_NNNNNN`` when the
    ``AsyncSave`` is polled or finished; training may continue meanwhile. The newest ``keep``
    checkpoints are kept. At most one save may be in progress. ``image``: of an earlier save of this
    policy, whose memory is used again unless an optimizer has made its first step since. A
    collective of all ranks; raises ``CheckpointError`` on every rank if the disk is full or
    unavailable.
    """
    final = checkpoint_path(folder, step)
    text, partial = run_on_rank_zero(
        lambda: (_encode({"step": step, **state}), begin_checkpoint(folder, step)),
        returns=tuple[str, Path],
        error=CheckpointError,
        what=_NOT_WRITTEN,
    )
    for model in policy.trained.values():
        model.memory.restore()
    failure = ""
    try:
        if image is None or image.stepped != _stepped(policy):
            image = make_image(policy)
        image.copy()
    except Exception as error:
        failure = f"{_NOT_WRITTEN}: {_reason(error)}"
    _raise_together(failure)
    assert image is not None
    publish = functools.partial(
        _publish,
        partial,
        final,
        json.loads(text),
        keep=keep,
        steps=_counts(policy),
        base=policy.base_checksum(),
    )
    return AsyncSave(image, partial, publish, final)


def save_checkpoint(
    policy: Policy, folder: Path, step: int, state: Mapping[str, object], *, keep: int
) -> Path:
    """``begin_save`` and wait; returns the checkpoint's path."""
    return begin_save(policy, folder, step, state, keep=keep).finish()


def load_checkpoint(policy: Policy, path: Path) -> dict[str, Any]:
    """Load models, optimizers and schedules, saved in any parallel layout; returns the saved
    ``state``.

    From the optimizer's parameter groups and the schedule only the step counts are loaded. Learning
    rates, decay and the length of the schedule are those that ``policy`` was built with. Each rank
    reads what it owns. While a thread reads the optimizer's state, the weights are gathered from
    their owners. Memory: a buffer of 16 MiB. A collective of all ranks; raises
    ``CheckpointError`` on every rank for a checkpoint that can't be read or is of another model.
    """
    for model in policy.trained.values():
        model.memory.restore()
        model.gather_weights()  # a running gather must not overwrite what is read
    states: list[Piece] = []
    counts: dict[str, float] = {}

    check_base(path, policy.base_checksum())

    def read_weights() -> None:
        counts.update(read_steps(path))
        for prefix, model in policy.trained.items():
            if counts[_schedule_key(prefix)]:
                make_state(model)
            for name in optimizer_numbers(model):
                if (key := _number_key(prefix, name)) not in counts:
                    raise MismatchError(f"it has no {key}")
        pieces = pieces_to_read(policy)
        read_pieces(path, [piece for piece in pieces if not piece.is_state])
        states.extend(piece for piece in pieces if piece.is_state)

    with _frozen_garbage(), ThreadPoolExecutor(1) as reader:
        _raise_together(_load_failure(path, read_weights))
        rest = reader.submit(_load_failure, path, lambda: read_pieces(path, states))
        for model in policy.trained.values():
            model.gather_weights(always=True)
        _raise_together(rest.result())
    for prefix, model in policy.trained.items():
        names = optimizer_numbers(model)
        set_optimizer_numbers(model, {name: counts[_number_key(prefix, name)] for name in names})
        schedule = _schedule(model)
        schedule.num_steps = 0
        schedule.step(counts[_schedule_key(prefix)])
    return read_state(path)


def _schedule(model: Policy) -> OptimizerParamScheduler:
    assert model.scheduler is not None, "a trained model"
    return model.scheduler


def _stepped(policy: Policy) -> list[bool]:
    """Which of the optimizers have made a step."""
    return [_schedule(model).num_steps > 0 for model in policy.trained.values()]


def _counts(policy: Policy) -> dict[str, float]:
    """The numbers in the optimizers' states and the steps of the schedules, by their keys."""
    counts: dict[str, float] = {}
    for prefix, model in policy.trained.items():
        numbers = {STEP: 0.0, **optimizer_numbers(model)}
        counts |= {_number_key(prefix, name): number for name, number in numbers.items()}
        counts[_schedule_key(prefix)] = _schedule(model).num_steps
    return counts


def _number_key(prefix: str, name: str) -> str:
    return f"{prefix}optimizer" if name == STEP else f"{prefix}optimizer.{name}"


def _schedule_key(prefix: str) -> str:
    return f"{prefix}schedule"


def _load_failure(path: Path, read: Callable[[], None]) -> str:
    """Why `read` failed, for the user; "" where it did not."""
    try:
        with torch.no_grad():
            read()
    except MismatchError as error:
        fix = "set model, algorithm, lora and optimizer.function as they were, or choose another run_dir"
        return (
            f"{path} is of another model or algorithm than this config's ({first_line(error)});"
            f" {fix}"
        )
    except Exception as error:
        return (
            f"{path} can't be loaded ({_reason(error)}); to resume from the one before, move it"
            " away"
        )
    return ""


def _write(image: FileImage, folder: Path, stop: threading.Event) -> None:
    """This rank's file and its index."""
    image.write(folder, stop.is_set)
    if not stop.is_set():
        write_index(folder, dist.get_rank(), image.parts)


def _publish(
    partial: Path,
    final: Path,
    state: Mapping[str, object],
    *,
    keep: int,
    steps: Mapping[str, float],
    base: str,
) -> None:
    """Join the ranks' indices and give the directory its name: flushing it and removing an old
    one take long.
    """
    parts = [part for rank in range(dist.get_world_size()) for part in read_index(partial, rank)]
    write_metadata_file(partial, parts)
    write_metadata_files(partial)
    publish_checkpoint(partial, final, state, keep=keep, steps=steps, base=base)


def _raise_failure(failure: str, folder: Path) -> None:
    """Raise ``CheckpointError`` on every rank if any rank has a failure.

    A collective of all ranks.
    """
    raise_on_every_rank(
        failure and f"{_NOT_WRITTEN}: {failure}{room_left(folder)}", CheckpointError
    )


def _raise_together(failure: str) -> None:
    """Raise ``CheckpointError`` on every rank if any rank has a failure; one all-reduce of a number
    if none has."""
    failed = torch.tensor(float(bool(failure)), device=compute_device())
    dist.all_reduce(failed)
    if failed.item():
        raise_on_every_rank(failure, CheckpointError)


def _encode(state: Mapping[str, object]) -> str:
    """The state as JSON; ``CheckpointError`` where it has no such form."""
    try:
        return json.dumps(state)
    except TypeError as error:
        raise CheckpointError(f"{_NOT_WRITTEN}: {error}") from error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Exclude older objects from garbage collection."""
    if gc.get_freeze_count():  # frozen by the caller
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
