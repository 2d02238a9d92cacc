"""`reasoning-gym` tasks as prompts: a training set and a held-out set that share no question."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_gspo.config import DataConfig, TaskConfig
from megatron_gspo.config.data_checks import check_prompt_format
from megatron_gspo.data.optional_module import optional_module
from megatron_gspo.data.prompt_files import PromptError, Row
from megatron_gspo.data.prompts import PromptSet, Tokenizer, build_prompts

# reasoning-gym draws item i of a dataset from Random(seed + i), so nearby seeds give mostly the
# same items
HELD_OUT_SEED_OFFSET = 1_000_000_000
METADATA_KEY = "reasoning_gym"
_MOST_DRAWS = 8  # items drawn per held-out question, because a task may repeat itself


@dataclass(frozen=True)
class TaskPrompts:
    """evaluation is None for eval_size 0; overlap counts the training items dropped for being
    held out.
    """

    train: PromptSet
    evaluation: PromptSet | None
    overlap: int


def load_task(
    task: TaskConfig, tokenizer: Tokenizer, data: DataConfig | None = None
) -> TaskPrompts:
    """Generate and tokenise a task.

    The held-out questions are distinct and drawn first, from a distant seed; a training item with
    the text of one of them is dropped. Verifiers find name, kwargs and entry in
    `Prompt.metadata["reasoning_gym"]`.

    data: format of the prompts; its keys of fields are not used. Raises ConfigError for an invalid
    format, PromptError for an unknown task, invalid options, or a task with too few distinct
    questions, MissingPackageError without reasoning-gym.
    """
    data = dataclasses.replace(
        data or DataConfig(), prompt_key="question", answer_key="answer", system_prompt_key=None
    )
    check_prompt_format(data)
    held_out = _held_out_rows(task)
    questions = {_question(row) for row in held_out}
    drawn = list(_rows(task, task.seed, task.size))
    kept = [row for row in drawn if _question(row) not in questions]
    if not kept:
        raise PromptError(
            f"task {task.name}: all {len(drawn)} training questions are held out; lower eval_size"
        )

    def tokenised(rows: list[Row], source: str) -> PromptSet:
        places = ((f"{source} item {i}", row) for i, row in enumerate(rows))
        return build_prompts(places, tokenizer, data, source=source)

    return TaskPrompts(
        train=tokenised(kept, f"task {task.name}"),
        evaluation=tokenised(held_out, f"held-out task {task.name}") if held_out else None,
        overlap=len(drawn) - len(kept),
    )


def create_dataset(name: str, kwargs: dict[str, Any], *, size: int, seed: int) -> Any:
    """A reasoning-gym dataset; PromptError in one line for an unknown name or refused settings."""
    factory = optional_module("reasoning_gym.factory", "reasoning-gym", "tasks", f"task {name}")
    if name not in factory.DATASETS:
        close = [known for known in sorted(factory.DATASETS) if name[:4] in known]
        raise PromptError(
            f"task {name!r} is unknown to reasoning-gym; use one of"
            f" {', '.join(close) or 'its datasets'}"
        )
    try:
        return factory.create_dataset(name, size=size, seed=seed, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise PromptError(
            f"task {name}: kwargs {kwargs} refused ({reason}); correct them"
        ) from error


def _held_out_rows(task: TaskConfig) -> list[Row]:
    if task.eval_size == 0:
        return []
    rows: dict[str, Row] = {}
    for row in _rows(task, task.seed + HELD_OUT_SEED_OFFSET, task.eval_size * _MOST_DRAWS):
        rows.setdefault(_question(row), row)
        if len(rows) == task.eval_size:
            return list(rows.values())
    raise PromptError(
        f"task {task.name}: eval_size is {task.eval_size} but only {len(rows)} distinct questions"
        " were drawn; lower it"
    )


def _rows(task: TaskConfig, seed: int, size: int) -> Iterator[Row]:
    dataset = create_dataset(task.name, task.kwargs, size=size, seed=seed)
    for entry in itertools.islice(dataset, size):
        yield {
            "question": entry["question"],
            "answer": entry["answer"],
            METADATA_KEY: {"name": task.name, "kwargs": task.kwargs, "entry": entry},
        }


def _question(row: Row) -> str:
    return row["question"].strip()
