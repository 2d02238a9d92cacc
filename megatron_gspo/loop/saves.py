"""The checkpoints of a run as they are written: one at a time, while the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from megatron_gspo.errors import EngineError
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.resume import LoopState, checkpoint_folder
from megatron_gspo.loop.servers import is_central
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.checkpoint.save_load import WAITING_WRITERS, AsyncSave, begin_save


class Saves:
    """Begins, polls and finishes the saves of a run; each method but ``forget`` is a collective of all ranks and raises
    ``CheckpointError`` on all of them where one can't write."""

    def __init__(self, run: Run, current: Path | None) -> None:
        self._run, self._current = run, current
        self._save: AsyncSave | None = None
        self._checked = False

    @property
    def current(self) -> Path | None:
        """Where the checkpoint of the weights as they are lies, or is being written; None where there is none."""
        return self._save.path if self._save is not None and self._current is not None else self._current

    def forget(self) -> None:
        """The weights are about to change: no checkpoint holds them any more."""
        self._current = None

    def begin(self, state: LoopState) -> None:
        """Save the run as it is; first wait for the save under way. With ``checkpoint.async_save: false`` it is whole
        on return."""
        self.finish()
        run, config = self._run, self._run.config.checkpoint
        self._save = begin_save(run.policy, checkpoint_folder(run), state.step, asdict(state), keep=config.keep,
                                check=not self._checked, writers=1 if config.async_save else WAITING_WRITERS)
        self._checked = True
        self._current = self._save.path
        if not config.async_save:
            self.finish()

    def poll(self, timers: Timers) -> None:
        """Give the save under way its name if it is written; nothing where there is none."""
        if self._save is None:
            return
        with timers("checkpoint"):
            if self._save.poll():
                self.finish()

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is whole."""
        if self._save is None:
            return
        path = self._save.finish()
        if self._current is not None:
            self._current = path
        self._save = None

    def end(self) -> None:
        """Give up the save under way: this rank's writers are ended."""
        if self._save is not None:
            self._save.end()


@contextmanager
def writing_checkpoints(run: Run, current: Path | None) -> Iterator[Saves]:
    """The run's saves; ``current``: the checkpoint that it goes on from. No writer outlives the context, however it is
    left: what isn't finished by then is given up."""
    saves = Saves(run, current)
    try:
        yield saves
    finally:
        saves.end()


@contextmanager
def saved_where_servers_fail(run: Run, saves: Saves, state: LoopState) -> Iterator[None]:
    """Save the run as it is, unless that is done or under way, before an `EngineError` of all ranks ends it."""
    try:
        yield
    except EngineError as error:
        if not is_central(run.engine) or not state.step:
            raise
        saved = "" if saves.current is not None else "saved, "
        if saves.current is None:
            saves.begin(state)
        saves.finish()
        raise EngineError(f"{error}; {saved}start again to go on from {saves.current}") from error
