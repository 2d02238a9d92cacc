"""The results of an evaluation: lines of text and evaluation.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.errors import printable
from megatron_gspo.tools.compare.statistics import interval_text
from megatron_gspo.tools.evaluate.task_scores import TaskScores
from megatron_gspo.tracking.progress import are_accuracies
from megatron_gspo.tracking.run_directory import write_atomically


def print_scores(scores: Sequence[TaskScores]) -> None:
    """A line per task and model on stdout."""
    for each in scores:
        if are_accuracies([each.accuracy.mean]):
            words = [f"mean@{each.samples} {interval_text(each.accuracy)} %"]
            words += [f"pass@{k} {interval_text(p)}" for k, p in each.pass_at_k.items() if k > 1]
        else:
            words = [f"mean reward {interval_text(each.accuracy, scale=1.0, digits=3)}"]
        words += [f"{count} rows left out: {reason}" for reason, count in each.left_out.items()]
        if each.failures:
            words.append(f"{each.failures} responses without a score")
        print(printable(f"{each.task}, {each.label}: {', '.join(words)}"))


def write_results(
    scores: Sequence[TaskScores], output: Path, *, command: str, config: Config
) -> Path:
    """Write evaluation.json; returns it."""
    record = {
        "command": command,
        "config": _used(config),
        "scores": [asdict(each) for each in scores],
    }
    file = output / "evaluation.json"
    write_atomically(file, json.dumps(record, indent=1) + "\n")
    return file


def _used(config: Config) -> dict[str, Any]:
    """The settings that the responses depend on."""
    data = config.data
    rollout = config.rollout
    evaluation = config.evaluation
    return {
        "seed": config.seed,
        "rollout.engine": rollout.engine,
        "rollout.max_response_length": rollout.max_response_length,
        "model.dtype": config.model.dtype,
        "evaluation.n_samples": evaluation.n_samples,
        "evaluation.temperature": evaluation.temperature,
        "evaluation.top_p": evaluation.top_p,
        "evaluation.top_k": evaluation.top_k,
        "data.chat_template": data.chat_template,
        "data.chat_template_options": data.chat_template_options,
        "data.system_prompt": data.system_prompt,
        "data.prompt_template": data.prompt_template,
    }
