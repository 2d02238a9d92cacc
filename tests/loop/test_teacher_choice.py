"""Which teacher a prompt names."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.config import DistillationConfig, TeacherConfig
from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.prompts import PromptError
from megatron_gspo.loop.teacher_choice import teacher_numbers
from tests.support.samples import make_prompt


def section(field: str | None = "extra.subject") -> DistillationConfig:
    teachers = tuple(TeacherConfig(name=name, teacher=name) for name in ("math", "code"))
    return DistillationConfig(teachers=teachers, teacher_field=field)


def prompts(*subjects: object) -> list:
    return [
        make_prompt(index, extra={"subject": subject}) for index, subject in enumerate(subjects)
    ]


def test_a_field_of_the_prompt() -> None:
    numbers = teacher_numbers(section(), prompts("code", "math", "code"))
    assert numbers.tolist() == [1, 0, 1]


def test_the_source_of_the_prompt() -> None:
    mixed = MixedPrompts({"code": [make_prompt()] * 2, "math": [make_prompt()] * 3})
    assert teacher_numbers(section(None), mixed).tolist() == [1, 1, 0, 0, 0]


def test_one_teacher_needs_no_name() -> None:
    assert teacher_numbers(DistillationConfig(teacher="one"), prompts("x")) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([*prompts("code", "math"), make_prompt(2)], "prompt 2 names no teacher: it has no field"),
        (prompts("code", "history"), 'prompt 1 names the teacher "history" in "extra.subject"'),
        (prompts("code", 3), "prompt 1 names the teacher 3 in"),
        (prompts("code", "code"), "distillation.teachers.math: no training prompt names it"),
    ],
)
def test_refused(given: list, message: str) -> None:
    with pytest.raises(PromptError) as error:
        teacher_numbers(section(), given)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_million_prompts_of_sources_are_not_read() -> None:
    class Unread(list):
        def __getitem__(self, index):
            raise AssertionError("read")

        def __len__(self):
            return 10**6

    numbers = teacher_numbers(section(None), MixedPrompts({"math": Unread(), "code": Unread()}))
    assert np.bincount(numbers).tolist() == [10**6, 10**6]
