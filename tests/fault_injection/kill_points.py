"""Kill a process of a run with SIGKILL at a chosen place: before its k-th file operation or call of
some kind.

File operations under the run directory are seen through Python's audit events, so every one of them
is a place to be killed at: each file opened to be written, each rename, each removal. Calls are
seen by wrapping functions by name.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

# what happens -> the function whose calls are counted; "update" is one optimizer of several, or one
# mini-batch's only
CALLS = {
    "generation": "megatron_gspo.rollout.embedded.embedded_engine:EmbeddedEngine._decode_batch",
    "verification": "megatron_gspo.rewards.scorer:RewardScorer.score_texts",
    "log-probs": "megatron_gspo.loop.log_probs:compute_log_probs",
    "values": "megatron_gspo.loop.critic:compute_values",
    "gradients": "megatron_gspo.loop.optimizer_steps:train_mini_batch",
    "value gradients": "megatron_gspo.loop.critic:train_critic_mini_batch",
    "update": "torch.optim:Adam.step",
    "weight update": "megatron_gspo.rollout.embedded.weight_loading:_fault",
    "evaluation": "megatron_gspo.loop.evaluation:evaluation_sampling",
    "load": "megatron_gspo.loop.checkpoints:load_checkpoint",
}
# what happens -> how the path in the run directory begins; the first that fits
FILES = {
    "save": "checkpoints/.partial_",
    "removal": "checkpoints/.removed_",
    "kept rollouts": "checkpoints/step_",
    "metrics": "metrics.jsonl",
    "samples": "samples/",
    "export": "hf",
    "value model's export": "critic_hf",
    "config": "config.yaml",
    "summary": "summary.json",
}
KINDS = (*CALLS, *FILES, "publication")
_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Target:
    """Kill ``rank``, or every rank, before the ``count``-th event of ``kind`` on that rank."""

    kind: str
    count: int
    rank: int
    kills_all: bool


class Tripwire:
    """Counts the events of this process; kills at the target.

    victims: process ids to kill along with this one, read when it comes to it.
    """

    def __init__(
        self, run_dir: Path, target: Target | None, victims: Callable[[], list[int]]
    ) -> None:
        self._root = str(run_dir.resolve()) + os.sep
        self._target = target
        self._victims = victims
        self._counts = [0] * len(KINDS)

    def install(self) -> None:
        """Begin to count. It can't be taken out again: for processes that do nothing else."""
        for kind, function in CALLS.items():
            self._wrap(kind, function)
        sys.addaudithook(self._on_event)

    def counts(self) -> dict[str, int]:
        """Events so far, by kind."""
        return dict(zip(KINDS, self._counts, strict=True))

    def _wrap(self, kind: str, place: str) -> None:
        module, _, path = place.partition(":")
        *parents, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._pass(kind)
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or (event == "open" and not arguments[2] & _WRITING):
            return
        path = _path(event, arguments)
        if not path.startswith(self._root):
            return
        path = path.removeprefix(self._root)
        kind = next((kind for kind, start in FILES.items() if path.startswith(start)), None)
        if event == "os.rename" and kind == "save":
            kind = "publication"
        if kind:
            self._pass(kind)

    def _pass(self, kind: str) -> None:
        number = KINDS.index(kind)
        self._counts[number] += 1
        target = self._target
        if target is not None and target.kind == kind and self._counts[number] == target.count:
            for process in self._victims():
                os.kill(process, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """The absolute path of an event; what a tree's removal deletes is named relative to an open
    directory.
    """
    path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes, os.PathLike)) else ""
    if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
    return os.path.abspath(path)
