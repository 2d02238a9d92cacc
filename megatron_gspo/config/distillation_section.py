"""Section `distillation` and its subsection `distillation.teachers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from megatron_gspo.config.paths import UserPath
from megatron_gspo.config.server_sections import ServerConfig
from megatron_gspo.objectives.distillation import Distillation


@dataclass(frozen=True, kw_only=True)
class TeacherServersConfig:
    """The servers of a teacher, if it has any."""

    urls: tuple[str, ...] = ()
    """URLs of the teacher's servers; empty: the trainer loads it."""
    engine: Literal["sglang", "vllm"] = "sglang"
    """Engine of these servers."""
    api_key_file: UserPath | None = None
    """File whose first line is the servers' API key."""

    @property
    def servers(self) -> ServerConfig:
        """The servers, with the limits and timeouts that an engine's have by default."""
        return ServerConfig(urls=self.urls, api_key_file=self.api_key_file)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(TeacherServersConfig):
    """One of several teachers."""

    name: str
    """Name in prompts and in metrics."""
    teacher: UserPath
    """Its directory, as `distillation.teacher`."""

    @property
    def prefix(self) -> str:
        """What precedes the keys of this teacher in messages."""
        return f"distillation.teachers.{self.name}" if self.name else "distillation"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(TeacherServersConfig, Distillation):
    """Teachers that score the policy's samples (docs/distillation.md)."""

    teacher: UserPath | None = None
    """Hugging Face directory of the teacher, with the policy's tokenizer."""
    teachers: tuple[TeacherConfig, ...] = ()
    """Several teachers in place of `teacher`, each for the prompts that name it."""
    teacher_field: str | None = None
    """Field of a prompt that names its teacher; null takes its source."""
    coef: Annotated[float, Gt(0)] = 1.0
    """Weight of the divergence from the teacher."""
    reward_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the rewards' advantages; 0 trains without them."""
    forward_weight: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the forward KL; the rest is reverse."""
    top_k: Annotated[int, Ge(0)] | Literal["all"] = 0
    """Ids that are summed exactly, or all (docs/distillation.md)."""

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None or bool(self.teachers)

    @property
    def takes_all_ids(self) -> bool:
        """Whether the divergence is over the whole vocabulary."""
        return self.top_k == "all"

    @property
    def num_ids(self) -> int:
        """The most likely ids that a teacher names: none with all."""
        return 0 if self.top_k == "all" else self.top_k

    @property
    def by_name(self) -> Mapping[str, TeacherConfig]:
        """The teachers by their names, in the order given; the only one is ""."""
        if self.teacher is None:
            return {teacher.name: teacher for teacher in self.teachers}
        only = TeacherConfig(
            name="",
            teacher=self.teacher,
            urls=self.urls,
            engine=self.engine,
            api_key_file=self.api_key_file,
        )
        return {"": only}

    @property
    def needs_groups(self) -> bool:
        """Whether the advantages are those of the rewards too."""
        return not self.is_on or self.reward_coef > 0
