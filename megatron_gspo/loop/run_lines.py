"""What a run prints of itself: at its start what it trains, on what and how; at its end where
its results are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.loop.checkpoints import LoopState
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.megatron_folders import iteration_folder
from megatron_gspo.models.tensor_sizes import tensor_sizes
from megatron_gspo.tracking.progress import are_accuracies, format_time
from megatron_gspo.tracking.run_environment import program

# What a run may have written, in the order of the line.
_RESULTS = (
    ("metrics.jsonl", "metrics"),
    ("curves.png", "curves"),
    ("timeline.svg", "time line"),
    ("profile", "recorded steps"),
    ("samples", "responses"),
    ("checkpoints", "checkpoints"),
    ("adapters", "PEFT adapters"),
    ("hf", "trained model, Hugging Face format"),
)
_MANY = 1_000_000_000


def start_lines(config: Config, *, prompts: int, held_out: int, verifier: str) -> list[str]:
    """Model, algorithm and data; steps, layout and engine; output and checkpoints. Reads the
    headers of the weights.

    Args:
        prompts, held_out: numbers of training and of held-out prompts.
        verifier: what gives the rewards, in words.
    """
    rollout = config.rollout
    training = config.training
    data = config.data
    replay = (
        ""
        if config.routing.replay == "none"
        else f" and routing replay {config.routing.replay.upper()}"
    )
    adapters = f", LoRA adapters of rank {config.lora.rank}" if config.lora.is_on else ""
    sources = [
        f"{name} {source.task.name if source.task is not None else source.prompts}".strip()
        for name, source in data.by_source.items()
    ]
    source = ", ".join(sources)
    if config.algorithm.is_supervised:
        task = f"{prompts:,} demonstrations of {source}"
    else:
        task = f"{prompts:,} prompts of {source}, rewards by {verifier}"
    evaluated = f"{held_out:,} held-out prompts" if held_out else "no held-out prompts"
    if held_out and config.evaluation.verifier is not None:
        evaluated += f" scored by {config.evaluation.verifier}"
    samples = f"{rollout.rollout_batch_size} prompts"
    if not config.algorithm.is_supervised:
        samples += f" x {rollout.n_samples_per_prompt} responses"
    engine = "" if config.algorithm.is_supervised else f", {rollout.engine} engine"
    interval = config.checkpoint.save_interval
    if interval:
        saved = (
            f"a checkpoint every {interval} steps"
            if interval > 1
            else "a checkpoint after every step"
        )
    else:
        saved = (
            "without checkpoints, so that an interrupted run begins again"
            " (checkpoint.save_interval: 0)"
        )
    trained = f"{config.model.path} ({_model(config)}{adapters})"
    return [
        f"{config.algorithm.name}{replay} trains {trained} on {task}; {evaluated}",
        (
            f"{_steps(training.steps)} of {samples}, {training.global_batch_size} a mini-batch;"
            f" {_layout(config)}{engine}"
        ),
        f"output in {config.run_dir}, {saved}",
    ]


def _held_out(before: float | None, after: float) -> str:
    """The mean rewards of the evaluations before and after the run, as accuracies if they can be."""
    mean_rewards = {"after": after} if before is None else {"before": before, "after": after}
    if are_accuracies(mean_rewards.values()):
        name = "accuracy"
        texts = [f"{100 * value:.1f} % {moment}" for moment, value in mean_rewards.items()]
    else:
        name = "reward"
        texts = [f"{value:.3f} {moment}" for moment, value in mean_rewards.items()]
    return f"held-out {name} {', '.join(texts)}"


def end_lines(config: Config, state: LoopState, *, held_out: int) -> list[str]:
    """How long the run took, its files, and the command that evaluates it."""
    folder = Path(config.run_dir)
    trains = config.training.only != "rollout"
    done = "trained" if trains else "generated"
    result = f"{done} {_steps(state.step)} in {format_time(state.wall_seconds)}"
    if state.accuracy_after is not None:
        result += f"; {_held_out(state.accuracy_before, state.accuracy_after)}"
    files = [f"{name} ({words})" for name, words in _RESULTS if _has_content(folder / name)]
    lines = [result, f"results in {folder}: {', '.join(files)}"]
    if not trains:
        lines.append(
            f"train on these batches with: training.only=train training.batches={config.training.batches}"
        )
    elif _has_content(folder / "hf") or _has_content(folder / "checkpoints"):
        tasks = "" if held_out else " --tasks FILE"
        lines.append(f"evaluate it with: {program()} evaluate {folder}{tasks}")
    else:
        lines.append(
            "the trained weights were not kept: checkpoint.export_hf is false and"
            " checkpoint.save_interval 0"
        )
    return lines


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _has_content(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _model(config: Config) -> str:
    """Such as `qwen3_moe, 30.5B parameters, bfloat16`."""
    family, shape = family_of(read_config(config.model.path))
    if config.model.init == "random":
        return f"{family.model_type}, random weights, {config.model.dtype}"
    count = sum(prod(sizes) for _, sizes in tensor_sizes(family, shape))
    text = f"{family.model_type}, {_count(count)} parameters, {config.model.dtype}"
    if config.model.megatron_path is None:
        return text
    return f"{text}, weights of {iteration_folder(config.model.megatron_path)}"


def _count(parameters: int) -> str:
    if parameters >= _MANY:
        return f"{parameters / _MANY:.1f}B"
    return f"{parameters / 1e6:.1f}M" if parameters >= 1e6 else f"{parameters:,}"


def _layout(config: Config) -> str:
    """Such as `4 processes, TP 2, EP 2, DP 2`."""
    parallel = config.parallel
    world = dist.get_world_size()
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    sizes: Sequence[tuple[str, int]] = (
        ("TP", tensor),
        ("EP", parallel.expert_model_parallel_size),
        ("PP", pipeline),
        ("CP", context),
        ("DP", world // (tensor * pipeline * context)),
    )
    shown = "".join(f", {name} {size}" for name, size in sizes if size > 1)
    return f"{world} process{'es' if world > 1 else ''}{shown}"
