"""Starting weights of the demo and the comparison: a small random Qwen3-MoE trained on demonstrations with mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Prompt
from megatron_gspo.loop.inputs import load_data
from megatron_gspo.tools.compare.study_plan import ColdStartFiles
from megatron_gspo.tools.compare.study_runner import run_one, torchrun

INSTRUCTION = "Spell this word backward (example: sun -> nus):"  # of the task; one token of the model
MISTAKES = 0.12  # share of the demonstrations' characters


def train(config: Path, processes: int, overrides: Sequence[str]) -> None:
    """Run the training under ``torchrun`` in the foreground.

    Raises SystemExit with its exit code if it fails, Interrupted if it is interrupted.
    """
    command = torchrun(processes, config, overrides)
    print("$", " ".join(["torchrun", *command[3:]]), flush=True)
    code = run_one(command)
    if code:
        raise SystemExit(code)


def held_out_and_training(model: Path, config: Config) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """The held-out and the training prompts of a config's data."""
    from transformers import AutoTokenizer

    training, held_out, _ = load_data(config, AutoTokenizer.from_pretrained(model))
    return held_out, training


def write_demonstrations(files: ColdStartFiles, config: Config, *, mistakes: float = MISTAKES, copies: int = 1) -> None:
    """demonstrations.jsonl (the training questions, answers with mistakes) and held_out.jsonl (correct answers).

    config: of the runs, for its prompts. mistakes: share of characters replaced by another of the answers'
    characters. copies: demonstrations per question, each with mistakes of its own.
    """
    held_out, training = held_out_and_training(files.model, config)
    random = Random(0)
    characters = sorted({c for prompt in training for c in prompt.answer or ""})

    def mistyped(text: str) -> str:
        return "".join(random.choice(characters) if random.random() < mistakes else c for c in text)

    for file, prompts, answer in (
        (files.demonstrations, [*training] * copies, mistyped),
        (files.held_out, held_out, str),
    ):
        rows = [json.dumps({"prompt": prompt.text, "answer": answer(prompt.answer or "")}) for prompt in prompts]
        file.write_text("\n".join(rows) + "\n")


def imitate(files: ColdStartFiles, config: Path, processes: int, overrides: Sequence[str] = ()) -> Path:
    """Run the supervised training; returns the directory of the trained weights."""
    own = [
        f"run_dir={files.run_dir}",
        f"data.prompts={files.demonstrations}",
        f"data.eval_prompts={files.held_out}",
        f"model.path={files.model}",
    ]
    train(config, processes, [*overrides, *own])
    return files.weights
