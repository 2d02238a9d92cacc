"""Prints the walk of a batch through one training step: the calls that get the batch, as a tree.

    python -m benchmarks.step_walk

A stay is a run of such calls in one folder of ``megatron_gspo``. The last line counts the stays in
a folder that the batch had left before.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import megatron_gspo
from megatron_gspo.config import Config
from megatron_gspo.data.sample_batch import BatchTable
from megatron_gspo.loop import training_loop
from megatron_gspo.tools.make_tiny_model import write_tiny_model

PACKAGE = Path(megatron_gspo.__file__).parent
OWN_FILES = ("data/sample_batch.py", "data/training_batch.py")  # of the batch itself


class Walk:
    """Records the calls of the package's functions that get a batch, with their depth."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []
        self._open: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function of ``sys.setprofile``."""
        if event == "return" and self._open and self._open[-1] is frame:
            self._open.pop()
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals[name] for name in names if name in frame.f_locals]
        file = Path(code.co_filename).relative_to(PACKAGE)
        if str(file) in OWN_FILES or not any(isinstance(value, BatchTable) for value in values):
            return
        self.calls.append((len(self._open), str(file), code.co_qualname))
        self._open.append(frame)

    def print(self) -> None:
        """The tree, without repeated calls, and how often the batch returned to a folder."""
        seen = set()
        for call in self.calls:
            if call not in seen:
                seen.add(call)
                depth, file, name = call
                print(f"{'  ' * depth}{file}: {name}")
        stays = [folder for folder, _ in groupby(Path(file).parent for _, file, _ in self.calls)]
        returns = len(stays) - len(set(stays))
        print(f"{len(self.calls)} calls, {len(stays)} stays, {returns} returns to a folder left")


def main() -> None:
    walk = Walk()
    train_step = training_loop.train_step

    def walked(*args: Any) -> Any:
        sys.setprofile(walk)
        try:
            return train_step(*args)
        finally:
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model(model)
        config = Config.from_dict(
            {
                "run_dir": f"{folder}/run",
                "model": {"path": str(model), "dtype": "float32"},
                "algorithm": {"name": "grpo"},
                "data": {
                    "task": {"name": "spell_backward", "size": 64, "eval_size": 0},
                    "max_prompt_length": 56,
                    "verifier": "exact_match",
                },
                "rollout": {
                    "rollout_batch_size": 4,
                    "n_samples_per_prompt": 2,
                    "max_response_length": 8,
                },
                "routing": {"replay": "r2"},
                "training": {
                    "steps": 1,
                    "global_batch_size": 4,
                    "max_tokens_per_micro_batch": 64,
                },
                "checkpoint": {"export_hf": False},
                "tracking": {"plot": False},
            }
        )
        training_loop.train_step = walked
        training_loop.train(config)
    walk.print()


if __name__ == "__main__":
    main()
