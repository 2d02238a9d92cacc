"""`reasoning-gym` tasks as prompts: a training set and a held-out set that share no question."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_gspo.data.prompt_files import PromptError, Row, optional_module
from megatron_gspo.data.prompts import PromptFormat, PromptSet, Tokenizer, build_prompts

# reasoning-gym draws item i of a dataset from Random(seed + i), so nearby seeds give mostly the same items
HELD_OUT_SEED_OFFSET = 1_000_000_000
METADATA_KEY = "reasoning_gym"
_MOST_DRAWS = 8  # items drawn per held-out question asked for, where a task repeats itself


@dataclass(frozen=True)
class TaskSpec:
    """A reasoning-gym dataset: its name, its own settings, how many prompts, and the generator's seed."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    size: int = 10_000
    eval_size: int = 256
    seed: int = 0


@dataclass(frozen=True)
class TaskPrompts:
    """evaluation is None for eval_size 0; overlap counts the training items dropped for being held out."""

    train: PromptSet
    evaluation: PromptSet | None
    overlap: int


def load_task(spec: TaskSpec, tokenizer: Tokenizer, prompt_format: PromptFormat | None = None) -> TaskPrompts:
    """Generate and tokenise a task.

    The held-out questions are distinct and drawn first, from a far-away seed; a training item with the text
    of one of them is dropped. Verifiers find name, kwargs and entry in `Prompt.metadata["reasoning_gym"]`.
    The format's prompt_key and answer_key are not used. Raises PromptError for an unknown task, settings that
    it refuses, or a task with too few distinct questions; ImportError without reasoning-gym.
    """
    prompt_format = dataclasses.replace(
        prompt_format or PromptFormat(), prompt_key="question", answer_key="answer"
    )
    prompt_format.check()
    held_out = _held_out_rows(spec)
    questions = {_question(row) for row in held_out}
    drawn = list(_rows(spec, spec.seed, spec.size))
    kept = [row for row in drawn if _question(row) not in questions]
    if not kept:
        raise PromptError(
            f"task {spec.name}: all {len(drawn)} training questions are held out; lower eval_size"
        )

    def tokenised(rows: list[Row], source: str) -> PromptSet:
        places = ((f"{source} item {i}", row) for i, row in enumerate(rows))
        return build_prompts(places, tokenizer, prompt_format, source=source)

    return TaskPrompts(
        train=tokenised(kept, f"task {spec.name}"),
        evaluation=tokenised(held_out, f"held-out task {spec.name}") if held_out else None,
        overlap=len(drawn) - len(kept),
    )


def create_dataset(name: str, kwargs: dict[str, Any], *, size: int, seed: int) -> Any:
    """A reasoning-gym dataset; PromptError in one line for an unknown name or refused settings."""
    factory = optional_module("reasoning_gym.factory", "reasoning-gym", "tasks", f"task {name}")
    if name not in factory.DATASETS:
        close = [known for known in sorted(factory.DATASETS) if name[:4] in known]
        raise PromptError(
            f"task {name!r} is unknown to reasoning-gym; use one of {', '.join(close) or 'its datasets'}"
        )
    try:
        return factory.create_dataset(name, size=size, seed=seed, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise PromptError(f"task {name}: kwargs {kwargs} refused ({reason}); correct them") from error


def _held_out_rows(spec: TaskSpec) -> list[Row]:
    if spec.eval_size == 0:
        return []
    rows: dict[str, Row] = {}
    for row in _rows(spec, spec.seed + HELD_OUT_SEED_OFFSET, spec.eval_size * _MOST_DRAWS):
        rows.setdefault(_question(row), row)
        if len(rows) == spec.eval_size:
            return list(rows.values())
    raise PromptError(
        f"task {spec.name}: eval_size is {spec.eval_size} but only {len(rows)} distinct questions were "
        "drawn; lower it"
    )


def _rows(spec: TaskSpec, seed: int, size: int) -> Iterator[Row]:
    dataset = create_dataset(spec.name, spec.kwargs, size=size, seed=seed)
    for entry in itertools.islice(dataset, size):
        yield {
            "question": entry["question"],
            "answer": entry["answer"],
            METADATA_KEY: {"name": spec.name, "kwargs": spec.kwargs, "entry": entry},
        }


def _question(row: Row) -> str:
    return row["question"].strip()
