"""Exit code and error stream of a command line, or of a run with a custom engine."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from megatron_gspo.config import Config
from megatron_gspo.loop.failures import exit_together
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.train import main, train
from tests.support.training_runs import WORD, base_config

LIMIT = 300.0  # seconds
VERIFIER = Path(__file__).with_name("spelling_verifier.py")
ROWS = [
    {"prompt": f"{WORD} {word}", "answer": word[::-1]}
    for word in ("dog", "cat", "sun", "map", "tin", "ore")
]


@dataclass(frozen=True)
class Case:
    """One bad input.

    name: what is wrong. phrase: the message without its values. overrides: of the command line.
    breaks: changes the config and the files of the case, in its folder. shows: values, files and
    fixes that the message names as well. code: the exit code.
    """

    name: str
    phrase: str
    overrides: tuple[str, ...] = ()
    breaks: Callable[[dict[str, Any], Path], None] | None = None
    shows: tuple[str, ...] = ()
    code: int = 2


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str

    @property
    def messages(self) -> list[str]:
        """The error messages for the user."""
        return [
            line
            for line in self.text.splitlines()
            if line.startswith(("error: ", "config error: "))
        ]


def small_config(model: str, folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """One GSPO step on six prompts of a file, scored in this process, with nothing at its end."""
    config = base_config(model, folder / "run")
    write_rows(folder / "prompts.jsonl", ROWS)
    config["data"] = {
        "prompts": str(folder / "prompts.jsonl"),
        "max_prompt_length": 32,
        "verifier": f"{VERIFIER}:score",
        "verifier_timeout": None,
    }
    config["training"]["steps"] = 1
    config["rollout"] |= {"rollout_batch_size": 2, "n_samples_per_prompt": 4}
    config["checkpoint"] = {"export_hf": False}
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def command_line(*arguments: str) -> Outcome:
    """``python -m megatron_gspo.train ARGUMENTS`` in a fork of this process."""
    return in_fork(lambda: main(list(arguments)))


def start(config: dict[str, Any], folder: Path, *overrides: str) -> Outcome:
    """The command line on a config, which is written to the folder."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return command_line(str(file), *overrides)


def with_engine(config: dict[str, Any], engine: RolloutEngine) -> Outcome:
    """A run like the command line's whose samples come from ``engine``."""
    checked = Config.from_dict(config)

    def action() -> None:
        with exit_together(run_dir=config["run_dir"], backend="gloo", timeout_minutes=1.0):
            train(checked, engine=engine)

    return in_fork(action)


def in_fork(action: Callable[[], None]) -> Outcome:
    """What ``action`` does in a fork of this process.

    torch keeps threads and files of every process group that a process has destroyed: a hundred
    runs in one process would slow down all tests after them.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_outcome, args=(action, sender))
    child.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT):
            raise TimeoutError(f"not done in {LIMIT:g} s")
        outcome = receiver.recv()
        child.join(LIMIT)
        return outcome
    finally:
        child.kill()
        child.join()


def _send_outcome(action: Callable[[], int | None], sender: Connection) -> None:
    faulthandler.dump_traceback_later(LIMIT - 10.0, file=sys.__stderr__)  # of what hangs
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = action()
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
            code = 1
    sender.send(Outcome(int(code or 0), text.getvalue()))


def check(case: Case, outcome: Outcome) -> None:
    """The exit code, and one line with the phrase and the values; no traceback."""
    assert "Traceback" not in outcome.text, outcome.text
    assert len(outcome.messages) == 1, outcome.text
    [line] = outcome.messages
    for shown in (case.phrase, *case.shows):
        assert shown in line, f"{shown!r} is not in: {line}"
    assert outcome.code == case.code, (outcome.code, line)
