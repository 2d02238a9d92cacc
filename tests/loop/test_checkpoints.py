"""The state of a run, and checkpoints that are saved one at a time; the saves themselves are
stubs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_gspo.config import CheckpointConfig
from megatron_gspo.errors import EngineError, RunError, SharedEngineError, UserError
from megatron_gspo.loop import checkpoints
from megatron_gspo.loop.checkpoints import CheckpointManager, LoopState
from megatron_gspo.loop.generation import DataCursor
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.rewards.verifiers import VerifierError


class Save:
    """Written once ``written`` is set."""

    def __init__(self, folder: Path, step: int, events: list[str]) -> None:
        self.path = folder / f".partial_{step}"
        self._final = folder / f"{step}"
        self.step = step
        self.events = events
        self.image = "its memory"
        self.written = False

    def poll(self) -> bool:
        return self.written

    def finish(self) -> Path:
        self.events.append(f"finished {self.step}")
        return self._final

    def end(self) -> None:
        self.events.append(f"ended {self.step}")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """A manager without a checkpoint, and what its saves did."""
    events: list[str] = []

    def begin_save(policy, folder, step, state, *, keep, image):
        assert state["step"] == step and keep == 2
        events.append(f"began {step} with {image}")
        return Save(folder, step, events)

    monkeypatch.setattr(checkpoints, "begin_save", begin_save)

    def make(**options) -> CheckpointManager:
        return CheckpointManager(None, CheckpointConfig(keep=2, **options), tmp_path, None)

    return SimpleNamespace(make=make, events=events, folder=tmp_path / "checkpoints")


def test_one_save_at_a_time(made):
    manager = made.make()
    timers = Timers()
    manager.poll(timers)
    manager.begin(LoopState(step=2))
    assert manager.current == made.folder / ".partial_2"
    manager.poll(timers)
    assert made.events == ["began 2 with None"]
    manager._save.written = True
    manager.poll(timers)
    assert made.events[1:] == ["finished 2"] and manager.current == made.folder / "2"
    manager.weights_change()
    assert manager.current is None
    manager.begin(LoopState(step=4))
    manager.begin(LoopState(step=6))
    assert made.events[2:] == ["began 4 with its memory", "finished 4", "began 6 with its memory"]
    assert set(timers.read_and_reset()) == {"time/checkpoint", "time/step"}


def test_a_save_that_outlives_its_weights_is_not_the_current_one(made):
    manager = made.make()
    manager.begin(LoopState(step=2))
    manager.weights_change()
    manager.finish()
    assert manager.current is None


def test_without_async_save_it_is_complete_on_return(made):
    manager = made.make(async_save=False)
    manager.begin(LoopState(step=2))
    assert made.events == ["began 2 with None", "finished 2"]
    assert manager.current == made.folder / "2"


def test_an_unfinished_save_is_discarded_at_the_end(made):
    with made.make() as manager:
        manager.begin(LoopState(step=2))
    assert made.events[-1] == "ended 2"


def test_saves_are_due_at_the_interval_and_the_end(made):
    manager = made.make(save_interval=3)
    assert [step for step in range(1, 9) if manager.is_due(step, 8)] == [3, 6, 8]
    assert not made.make(save_interval=0).is_due(8, 8)


@pytest.mark.parametrize(("begun", "saved"), [(False, "saved, "), (True, "")])
def test_failing_servers_leave_a_checkpoint(made, begun, saved):
    manager = made.make()
    if begun:
        manager.begin(LoopState(step=2))
    with pytest.raises(
        SharedEngineError, match=f"^no server; {saved}start again to resume from {made.folder}/2$"
    ):
        with manager.saved_on_failure(LoopState(step=2)):
            raise SharedEngineError("no server")
    assert made.events == ["began 2 with None", "finished 2"]


def test_a_verifier_that_fails_leaves_a_checkpoint(made):
    resumes = f"^no judge; saved, start again to resume from {made.folder}/2$"
    with pytest.raises(RunError, match=resumes) as raised:
        with made.make().saved_on_failure(LoopState(step=2)):
            raise VerifierError("no judge")
    assert made.events == ["began 2 with None", "finished 2"] and raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (0, SharedEngineError("no server")),
        (0, VerifierError("no judge")),
        (2, EngineError("one rank's")),
    ],
)
def test_other_failures_save_nothing(made, step, error):
    with pytest.raises(UserError) as raised:
        with made.make().saved_on_failure(LoopState(step=step)):
            raise error
    assert raised.value is error and made.events == []


def test_the_state_after_a_step():
    state = LoopState(step=3, cursor=5, samples=2, tokens=9, accuracy_before=0.25)
    after = state.after_step(DataCursor(8, (6, 7)), samples=2, tokens=10)
    assert after == LoopState(
        step=4, cursor=8, pending=(6, 7), samples=4, tokens=19, accuracy_before=0.25
    )
    assert LoopState(**json.loads(json.dumps(asdict(after)))).data_cursor == DataCursor(8, (6, 7))


def test_a_state_of_another_version_is_refused():
    state = asdict(LoopState())
    checkpoints._check_state(Path("at"), state)
    with pytest.raises(CheckpointError, match="at/state.json lacks step: it is of another version"):
        checkpoints._check_state(
            Path("at"), {name: value for name, value in state.items() if name != "step"}
        )
    with pytest.raises(CheckpointError, match="has the unknown key more"):
        checkpoints._check_state(Path("at"), state | {"more": 1})
