"""Starting weights of the demo and the comparison: a small random Qwen3-MoE trained on
demonstrations with mistakes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from megatron_gspo.config import Config, load_config
from megatron_gspo.data.sample import Prompt
from megatron_gspo.loop.inputs import load_data
from megatron_gspo.tools.compare.study_plan import ColdStartFiles, Comparison, arguments_of
from megatron_gspo.tools.compare.study_runner import StaleRun, run_one, torchrun
from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from megatron_gspo.tracking.run_directory import write_atomically

INSTRUCTION = (  # of the task; one token of the model
    "Spell this word backward (example: sun -> nus):"
)
MISTAKES = 0.12  # share of the demonstrations' characters


def prepare(comparison: Comparison) -> None:
    """Run the cold start if the comparison has one and it is not done yet.

    Raises StaleRun if it was done with other settings.
    """
    start = comparison.config.cold_start
    if start is None:
        return
    files = ColdStartFiles(comparison.folder)
    done = comparison.folder / "cold_start.json"
    settings = dataclasses.asdict(start)
    if done.is_file():
        if json.loads(done.read_text()) != settings:
            raise StaleRun(
                f"{done}: the cold start was made with other settings; choose another folder"
            )
        return
    comparison.folder.mkdir(parents=True, exist_ok=True)
    size = TinyModel(**dataclasses.asdict(start.model))
    count = write_tiny_model(files.model, size, words=[INSTRUCTION])
    print(
        f"cold start: a random Qwen3-MoE of {count:,} parameters learns from demonstrations",
        file=sys.stderr,
    )
    runs = load_config(comparison.base_file, arguments_of(comparison.config.overrides))
    write_demonstrations(files, runs, mistakes=start.mistakes, copies=start.copies)
    config = comparison.resolve_path(start.config)
    imitate(files, config, start.processes, arguments_of(start.overrides))
    write_atomically(done, json.dumps(settings, indent=2) + "\n")


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


def write_demonstrations(
    files: ColdStartFiles, config: Config, *, mistakes: float = MISTAKES, copies: int = 1
) -> None:
    """demonstrations.jsonl (the training questions, answers with mistakes) and held_out.jsonl
    (correct answers).

    config: of the runs, for its prompts. mistakes: share of characters replaced by another of the
    answers' characters. copies: demonstrations per question, each with mistakes of its own.
    """
    held_out, training = held_out_and_training(files.model, config)
    random = Random(0)
    characters = sorted({c for prompt in training for c in prompt.answer or ""})

    def mistyped(text: str) -> str:
        return "".join(random.choice(characters) if random.random() < mistakes else c for c in text)

    shown = [(prompt.text, mistyped(prompt.answer or "")) for prompt in [*training] * copies]
    _write_prompts(files.demonstrations, shown)
    _write_prompts(files.held_out, [(prompt.text, prompt.answer or "") for prompt in held_out])


def _write_prompts(file: Path, prompts: Sequence[tuple[str, str]]) -> None:
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in prompts]
    file.write_text("\n".join(lines) + "\n")


def imitate(
    files: ColdStartFiles, config: Path, processes: int, overrides: Sequence[str] = ()
) -> Path:
    """Run the supervised training; returns the directory of the trained weights."""
    paths = [
        f"run_dir={files.run_dir}",
        f"data.prompts={files.demonstrations}",
        f"data.eval_prompts={files.held_out}",
        f"model.path={files.model}",
    ]
    train(config, processes, [*overrides, *paths])
    return files.weights
