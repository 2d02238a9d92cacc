"""Checkpoints of a run: its state, resuming from the newest one, and saving while training
continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_gspo.config import CheckpointConfig, Config
from megatron_gspo.errors import RunError, SharedEngineError
from megatron_gspo.loop.earlier_run import check_no_input_is_moved, continued_settings
from megatron_gspo.loop.generation import DataCursor
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    CheckpointError,
    newest_checkpoint,
    read_state,
    remove_leftovers,
    remove_old,
)
from megatron_gspo.mcore.checkpoint.file_image import FileImage
from megatron_gspo.mcore.checkpoint.save_load import AsyncSave, begin_save, load_checkpoint
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class LoopState:
    """All that a resumed run needs besides weights and optimizer; saved with every checkpoint."""

    step: int = 0  # rollout batches trained on
    cursor: int = 0  # prompts drawn
    pending: tuple[int, ...] = ()  # indices of the drawn prompts that are not trained on yet
    samples: int = 0
    tokens: int = 0
    wall_seconds: float = 0.0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    callbacks: dict[str, dict[str, object]] = field(default_factory=dict)  # `state` by name

    @property
    def data_cursor(self) -> DataCursor:
        """Position in the training prompts."""
        return DataCursor(self.cursor, tuple(self.pending))

    def after_step(self, cursor: DataCursor, samples: int, tokens: int) -> LoopState:
        """The state after one more step on so many samples and tokens."""
        return replace(
            self,
            step=self.step + 1,
            cursor=cursor.drawn,
            pending=cursor.pending,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
        )


def checkpoint_folder(run_dir: str | Path) -> Path:
    """The folder of a run's checkpoints."""
    return Path(run_dir) / "checkpoints"


def resume(policy: Policy, config: Config) -> tuple[LoopState, Path | None]:
    """Load the newest complete checkpoint, if ``checkpoint.resume`` allows it and there is one:
    (state, checkpoint).

    Rank 0 chooses for all ranks, and reports its choice, what is wrong with the checkpoints that it
    skips and which settings have changed. Raises ``CheckpointError`` for a run of another model.
    """
    checkpoint = run_on_rank_zero(
        lambda: _choose(config),
        returns=Path | None,
        error=CheckpointError,
        what="the run's checkpoints can't be read",
    )
    if checkpoint is None:
        return LoopState(), None
    state = LoopState(**load_checkpoint(policy, checkpoint))
    if dist.get_rank() == 0:
        logger.info(f"resumed from {checkpoint}: step {state.step}")
    return state, checkpoint


class CheckpointManager:
    """Begins, polls and finishes the saves of a run, one at a time.

    Each method but ``weights_change`` is a collective of all ranks and raises ``CheckpointError``
    on all of them if one can't write. As a context manager it ends a save when the context is left:
    an unfinished save is discarded.
    """

    def __init__(
        self, policy: Policy, config: CheckpointConfig, run_dir: str | Path, current: Path | None
    ) -> None:
        """current: the checkpoint that the run resumed from; None if there is none."""
        self._policy = policy
        self._config = config
        self._folder = checkpoint_folder(run_dir)
        self._current = current
        self._save: AsyncSave | None = None
        self._image: FileImage | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *error: object) -> None:
        if self._save is not None:
            self._save.end()

    @property
    def current(self) -> Path | None:
        """The checkpoint of the current weights, complete or being written; None if there is
        none.
        """
        return (
            self._save.path
            if self._save is not None and self._current is not None
            else self._current
        )

    def weights_change(self) -> None:
        """The weights are about to change: no checkpoint holds them any more."""
        self._current = None

    def is_due(self, step: int, last: int) -> bool:
        """Whether a checkpoint is saved after ``step``: at the interval (0: never), and after
        the last step.
        """
        interval = self._config.save_interval
        return bool(interval) and (step % interval == 0 or step == last)

    def begin(self, state: LoopState) -> None:
        """Save the run; first wait for the previous save. With ``checkpoint.async_save: false`` it
        is complete on return."""
        self.finish()
        config = self._config
        self._save = begin_save(
            self._policy,
            self._folder,
            state.step,
            asdict(state),
            keep=config.keep,
            image=self._image,
        )
        self._image = self._save.image
        self._current = self._save.path
        if not config.async_save:
            self.finish()

    def poll(self, timers: Timers) -> None:
        """Publish the save in progress if it is written."""
        if self._save is None:
            return
        with timers("checkpoint"):
            if self._save.poll():
                self.finish()

    def finish(self) -> None:
        """Wait until the save in progress, if there is one, is complete."""
        if self._save is None:
            return
        path = self._save.finish()
        if self._current is not None:
            self._current = path
        self._save = None

    @contextmanager
    def saved_on_failure(self, state: LoopState) -> Iterator[None]:
        """Save the run, unless that is done or in progress, before an error that every rank raises
        ends it: an engine's, or that of a verifier without a reward.
        """
        try:
            yield
        except (SharedEngineError, VerifierError) as error:
            if not state.step:
                raise
            saved = "" if self.current is not None else "saved, "
            if self.current is None:
                self.begin(state)
            self.finish()
            failure = RunError if isinstance(error, VerifierError) else SharedEngineError
            raise failure(f"{error}; {saved}start again to resume from {self.current}") from error


def _choose(config: Config) -> Path | None:
    """The checkpoint to resume from.

    Removes what a killed run left incomplete: a save, or the removal of old ones.
    """
    folder = checkpoint_folder(config.run_dir)
    if config.checkpoint.resume != "auto":
        return None
    remove_leftovers(folder)
    checkpoint, faults = newest_checkpoint(folder)
    for fault in faults:
        what = f"resuming from {checkpoint.name}" if checkpoint else "starting from the beginning"
        logger.warning(f"{fault}: {what}")
    if checkpoint is None:
        check_no_input_is_moved(config)
        return None
    _check_state(checkpoint, read_state(checkpoint))
    if changes := continued_settings(config):
        logger.info(changes)
    remove_old(folder, keep=config.checkpoint.keep)
    return checkpoint


def _check_state(path: Path, state: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(LoopState)}
    wrong = sorted(known ^ state.keys())
    if wrong:
        what = "lacks" if wrong[0] in known else "has the unknown key"
        raise CheckpointError(
            f"{path}/state.json {what} {wrong[0]}: it is of another version of this program; "
            "continue with that version or start again in another run_dir"
        )
