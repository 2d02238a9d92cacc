"""Which of several teachers scores the responses to which prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_gspo.config import DistillationConfig
from megatron_gspo.config.config_error import show
from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.prompt_rows import value_at
from megatron_gspo.data.prompts import PromptError
from megatron_gspo.data.sample import Prompt


def teacher_numbers(
    distillation: DistillationConfig, prompts: Sequence[Prompt]
) -> np.ndarray | None:
    """[prompts] int32: the position of each prompt's teacher among `distillation.teachers`; None
    without these.

    prompts: of training. Raises PromptError for a prompt that names none of them, and for a teacher
    that no prompt names.
    """
    numbers = {teacher.name: number for number, teacher in enumerate(distillation.teachers)}
    if not numbers:
        return None
    if distillation.teacher_field is None:
        assert isinstance(prompts, MixedPrompts), "the sources are teachers, says the config"
        of_sources = np.array([numbers[source] for source in prompts.sources], dtype=np.int32)
        return of_sources[prompts.source_numbers(np.arange(len(prompts)))]
    field = distillation.teacher_field
    chosen = np.array([_number(prompt, field, numbers) for prompt in prompts], dtype=np.int32)
    for name, number in numbers.items():
        if not (chosen == number).any():
            raise PromptError(
                f"distillation.teachers.{name}: no training prompt names it in {show(field)}; remove"
                " the teacher, or set distillation.teacher_field"
            )
    return chosen


def _number(prompt: Prompt, field: str, numbers: Mapping[str, int]) -> int:
    try:
        name = value_at(prompt.metadata, field)
    except KeyError:
        raise PromptError(
            f"prompt {prompt.index} names no teacher: it has no field {show(field)}; add it, or set"
            " distillation.teacher_field"
        ) from None
    number = numbers.get(name) if isinstance(name, str) else None
    if number is None:
        raise PromptError(
            f"prompt {prompt.index} names the teacher {show(name)} in {show(field)}; the"
            f" distillation.teachers are {', '.join(numbers)}"
        )
    return number
