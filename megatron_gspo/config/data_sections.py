"""Section `data` and its subsections `data.task` and `data.sources`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.config.paths import UserPath

JUDGES = ("judge", "judge_ranking")
JUDGE_GRACE = 5.0  # seconds between the end of a judge's requests and `verifier_timeout`
JUDGE_REQUEST_SECONDS = 60.0  # default of `verifier_options.request_timeout`


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A generated reasoning-gym task."""

    name: str
    """A reasoning-gym dataset, e.g. chain_sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the dataset."""
    size: Annotated[int, Ge(1)] = 10_000
    """Number of training prompts."""
    eval_size: Annotated[int, Ge(0)] = 256
    """Held-out prompts; none is a training prompt."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the generator."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of several sources of prompts. A key that is null has the value of `data`."""

    name: str
    """Name in metrics; verifiers see it as `prompt.source`."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the prompts, relative to the other weights."""
    prompts: UserPath | tuple[UserPath, ...] | None = None
    """Training prompts, as `data.prompts`; null with `task`."""
    task: TaskConfig | None = None
    """A generated task in place of `prompts`."""
    eval_prompts: UserPath | tuple[UserPath, ...] | None = None
    """Held-out prompts, as `data.eval_prompts`."""
    prompt_key: str | None = None
    """Field of the question."""
    answer_key: str | None = None
    """Field of the reference answer."""
    chat_template: bool | None = None
    """Whether the chat template is applied."""
    system_prompt: str | None = None
    """System message."""
    system_prompt_key: str | None = None
    """Field of a row's own system message."""
    last_assistant_message: Literal["error", "drop", "answer", "continue"] | None = None
    """What to do with a last message that is the assistant's."""
    prompt_template: str | None = None
    """Text of a prompt, with {question}."""
    verifier: UserPath | None = None
    """Verifier of this source's responses."""
    verifier_options: dict[str, Any] | None = None
    """Keyword arguments of the verifier."""
    verifier_timeout: Annotated[float, Gt(0)] | None = None
    """Seconds per response."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts, their format and the verifier that scores responses."""

    prompts: UserPath | tuple[UserPath, ...] | None = None
    """Training prompts: files, folders, globs or saved data sets (docs/data.md); null with `task`.
    """
    task: TaskConfig | None = None
    """A generated reasoning-gym task in place of `prompts`."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources in place of `prompts` (docs/data.md)."""
    eval_prompts: UserPath | tuple[UserPath, ...] | None = None
    """Held-out prompts, as `prompts`; null takes those of `task`."""
    prompt_key: str = "prompt"
    """Field of the question, e.g. extra_info.question."""
    answer_key: str | None = "answer"
    """Field of the reference answer; null is none."""
    chat_template: bool = False
    """Apply the tokenizer's chat template."""
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    """Options of the chat template, e.g. {enable_thinking: false}."""
    system_prompt: str | None = None
    """System message; needs `chat_template`."""
    system_prompt_key: str | None = None
    """Field of a row's own system message."""
    last_assistant_message: Literal["error", "drop", "answer", "continue"] = "error"
    """Action on a last message of the assistant (docs/data.md)."""
    prompt_template: str = "{question}"
    """Text of a prompt, with {question} for the question."""
    max_prompt_length: Annotated[int, Ge(1)] = 1024
    """Maximum prompt length in tokens."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Action on longer prompts."""
    cache_dir: UserPath | None = None
    """Folder of tokenised prompts; null is `prompts/` in `run_dir`."""
    keep_special_tokens: bool = True
    """Whether verifiers and environments see special tokens of responses."""
    verifier: UserPath | None = None
    """Name of a verifier, or the import path of your own (docs/extending.md); null is exact_match,
    or with `task` reasoning_gym.
    """
    verifier_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the verifier."""
    verifier_timeout: Annotated[float, Gt(0)] | None = 10.0
    """Seconds per response, or per batch for verifiers of batches; null verifies in the trainer's
    process, without a limit.
    """
    verifier_failure_reward: float | None = None
    """Reward where verification failed; null excludes the response."""
    verifier_workers: Annotated[int, Ge(1)] = 1
    """Verifier processes per rank, at most."""
    code: CodeConfig = field(default_factory=CodeConfig)
    """Options of the verifier `code`; see docs/code_rewards.md."""
    shuffle: bool = True
    """Shuffle the prompts on each pass."""

    @property
    def by_source(self) -> dict[str, DataConfig]:
        """Format and verifier of each source, by its name; of this section alone, under the name
        "", where it has no sources.
        """
        if not self.sources:
            return {"": self}
        return {source.name: self._of_source(source) for source in self.sources}

    def with_verifier(
        self, verifier: str, options: dict[str, Any], timeout: float | None
    ) -> DataConfig:
        """A copy of this section with one verifier for all sources."""
        sources = tuple(
            replace(source, verifier=None, verifier_options=None, verifier_timeout=None)
            for source in self.sources
        )
        return replace(
            self,
            sources=sources,
            verifier=verifier,
            verifier_options=options,
            verifier_timeout=timeout,
        )

    def _of_source(self, source: SourceConfig) -> DataConfig:
        given = {key.name: getattr(source, key.name) for key in fields(source)}
        del given["name"], given["weight"]
        changes = {key: value for key, value in given.items() if value is not None}
        return replace(self, sources=(), **changes)

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The verifiers of all sources, each once, null resolved."""
        return tuple(dict.fromkeys(data.resolved_verifier for data in self.by_source.values()))

    @property
    def given_verifiers(self) -> dict[str, str]:
        """The verifiers that are set, by their keys; those that are null are left out."""
        given = {"data.verifier": self.verifier}
        given |= {
            f"data.sources.{source.name}.verifier": source.verifier for source in self.sources
        }
        return {key: verifier for key, verifier in given.items() if verifier is not None}

    @property
    def prompt_paths(self) -> tuple[str, ...]:
        """`prompts` as a list; empty with `task`."""
        return _as_tuple(self.prompts)

    @property
    def eval_prompt_paths(self) -> tuple[str, ...]:
        """`eval_prompts` as a list; empty without any."""
        return _as_tuple(self.eval_prompts)

    @property
    def resolved_verifier(self) -> str:
        """`verifier`, null resolved."""
        return self.verifier or ("reasoning_gym" if self.task else "exact_match")

    @property
    def resolved_verifier_options(self) -> dict[str, Any]:
        """Keyword arguments of the verifier.

        The tests of a response end in time for its last one to be killed, and the requests of a
        judge in time for the scores of those that were answered.
        """
        if self.resolved_verifier in JUDGES:
            assert self.verifier_timeout is not None
            return self.verifier_options | {"time_limit": self.verifier_timeout - JUDGE_GRACE}
        if self.resolved_verifier != "code":
            return self.verifier_options
        assert self.verifier_timeout is not None
        return asdict(self.code) | {
            "time_budget": self.verifier_timeout - self.code.wall_limit - 1.0
        }

    @property
    def has_eval_prompts(self) -> bool:
        """Whether there are held-out prompts."""
        return any(
            data.eval_prompts is not None or (data.task is not None and data.task.eval_size > 0)
            for data in self.by_source.values()
        )


def _as_tuple(paths: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if paths is None:
        return ()
    return (paths,) if isinstance(paths, str) else paths
