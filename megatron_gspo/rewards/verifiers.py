"""Verifiers: functions that score a response. Built in or the user's own, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_gspo.data.optional_module import optional_module
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import InputError, first_line
from megatron_gspo.rewards.answer_extraction import STYLES, equal_answers, extract_answer
from megatron_gspo.rewards.reward_signatures import SignatureError, as_verifier
from megatron_gspo.user_code import load_function, with_neighbours

if TYPE_CHECKING:
    from pydantic import BaseModel

    from megatron_gspo.rewards.judge_servers import JudgeServers

Verifier = Callable[[str, Prompt], float]
"""verifier(response_text, prompt) -> reward, a finite number. It may raise; `RewardScorer` counts
it.

Its attribute `description`, if it has one, is a line that a run prints at its start. One with the
attribute `takes_batch` takes all responses of a batch, with a prompt for each, and returns a list;
an exception in it is why that response has no reward. With `scores_shares` as well each rank calls
it with a share of the batch."""


class VerifierError(InputError):
    """A verifier that can't be loaded; one line naming it and the fix."""


def load_verifier(name: str, options: dict[str, Any] | None = None) -> Verifier:
    """The verifier of that name.

    name: one of `BUILT_IN`, "path/to/file.py:function" or "package.module:function".
    options: for built-in ones the keyword arguments of the `make_...` function below; for others
        keyword arguments of every call.
    Raises VerifierError in one line if it can't be found, loaded or called; MissingPackageError
        without an optional package that it needs.
    """
    options = options or {}
    if name in BUILT_IN:
        try:
            return BUILT_IN[name](**options)
        except TypeError as error:
            raise VerifierError(
                f"verifier {name}: options {options} don't fit ({error}); correct them"
            ) from error
    location, colon, function_name = name.rpartition(":")
    if not colon or not location or not function_name:
        known = ", ".join(BUILT_IN)
        raise VerifierError(
            f"verifier {name!r} is unknown; use {known}, file.py:function or module:function"
        )
    function = load_function(name, "verifier", VerifierError)
    try:
        verifier = as_verifier(function, options)
    except SignatureError as error:
        raise VerifierError(f"verifier {name!r}: {error}") from None
    takes_batch = getattr(verifier, "takes_batch", False)
    verifier = with_neighbours(name, verifier)
    if takes_batch:
        verifier.takes_batch = True  # type: ignore[attr-defined]
    description = getattr(function, "description", None)
    if description is not None:
        verifier.description = description  # type: ignore[attr-defined]
    return verifier


def make_exact_match(style: str = "whole") -> Verifier:
    """1 if the response's answer (`extract_answer` style) equals prompt.answer (`equal_answers`);
    else 0.

    The reference may be a whole solution: what is in the style's tags, box or after its #### is
    taken of it.
    """
    _check_style(style)

    def exact_match(text: str, prompt: Prompt) -> float:
        reference = _reference(prompt)
        reference_answer = extract_answer(reference, style) or reference.strip()
        answer = extract_answer(text, style)
        return float(answer is not None and equal_answers(answer, reference_answer, style))

    return exact_match


def make_math_verify() -> Verifier:
    """1 if `math-verify` finds the response's answer equal to prompt.answer; else 0. See
    `math_answers`.
    """
    optional_module("math_verify", "math-verify", "tasks", "verifier math_verify")
    from megatron_gspo.rewards.math_answers import equal_to_reference

    return lambda text, prompt: float(equal_to_reference(text, _reference(prompt)))


def make_reasoning_gym(style: str = "whole", partial_credit: bool = True) -> Verifier:
    """The task's own score (`score_answer`) of the response's answer, usually in [0, 1]; no answer
    scores 0.

    style: see `extract_answer`. partial_credit=False: 1 for a full score, else 0.
    """
    _check_style(style)
    from megatron_gspo.data.tasks import METADATA_KEY, create_dataset

    datasets: dict[str, Any] = {}

    def reasoning_gym(text: str, prompt: Prompt) -> float:
        if METADATA_KEY not in prompt.metadata:
            raise ValueError(
                f"prompt {prompt.index} is not from a reasoning-gym task; use another verifier"
            )
        task = prompt.metadata[METADATA_KEY]
        key = f"{task['name']} {task['kwargs']}"
        if key not in datasets:
            datasets[key] = create_dataset(task["name"], task["kwargs"], size=1, seed=0)
        answer = extract_answer(text, style)
        if answer is None:
            return 0.0
        score = float(datasets[key].score_answer(answer=answer, entry=task["entry"]))
        return score if partial_credit else float(score >= 1.0)

    return reasoning_gym


def make_code(**options: Any) -> Verifier:
    """Runs the response's program on the prompt's test cases in a sandbox; see
    `sandbox.code_verifier`.
    """
    from megatron_gspo.rewards.sandbox.code_verifier import CodeVerifier, SandboxError

    try:
        return CodeVerifier(**options)
    except SandboxError as error:
        raise VerifierError(f"verifier code: {error}") from error


def make_judge(
    *,
    instructions: str,
    template: str | None = None,
    verdict: str | None = None,
    **servers: Any,
) -> Any:
    """The score that a model behind OpenAI-compatible servers gives each response.

    Args:
        instructions: the system message.
        template: the user's message, with {question}, {response}, {answer}, {reference} and fields
            of the row.
        verdict: import path of a pydantic model of the answer, with a field or property `score`;
            None: a reason and a score from 0 to 1.
        servers: arguments of `JudgeServers`.
    """
    from megatron_gspo.rewards.judge import SCORE_TEMPLATE, Judge, Verdict

    model = Verdict if verdict is None else _verdict_model(verdict)
    return Judge(_judge_servers(servers), instructions, template or SCORE_TEMPLATE, model)


def make_judge_ranking(*, instructions: str, template: str | None = None, **servers: Any) -> Any:
    """Scores from a model's ranking of the responses to each prompt.

    The arguments are those of `make_judge`; template has {responses} in place of {response}.
    """
    from megatron_gspo.rewards.judge import RANKING_TEMPLATE, RankingJudge

    return RankingJudge(_judge_servers(servers), instructions, template or RANKING_TEMPLATE)


def make_reward_model(**options: Any) -> Any:
    """The score of a sequence classifier; see `reward_model.RewardModel`."""
    from megatron_gspo.rewards.reward_model import RewardModel, RewardModelError

    try:
        return RewardModel(**options)
    except RewardModelError as error:
        raise VerifierError(f"verifier reward_model: {error}") from error


BUILT_IN: dict[str, Callable[..., Any]] = {
    "exact_match": make_exact_match,
    "math_verify": make_math_verify,
    "reasoning_gym": make_reasoning_gym,
    "code": make_code,
    "judge": make_judge,
    "judge_ranking": make_judge_ranking,
    "reward_model": make_reward_model,
}


def _judge_servers(settings: dict[str, Any]) -> JudgeServers:
    from megatron_gspo.rewards.judge_servers import JudgeServers

    try:
        return JudgeServers(**settings)
    except (ValueError, OSError) as error:
        raise VerifierError(f"verifier_options: {first_line(error)}") from error


def _verdict_model(name: str) -> type[BaseModel]:
    from pydantic import BaseModel

    model = load_function(name, "verifier_options.verdict", VerifierError)
    if isinstance(model, type) and issubclass(model, BaseModel):
        if "score" in model.model_fields or hasattr(model, "score"):
            return model
    raise VerifierError(
        f"verifier_options.verdict {name!r}: it must be a class of pydantic.BaseModel with a field"
        " or property score"
    )


def _check_style(style: str) -> None:
    if style not in STYLES:
        raise VerifierError(f"verifier style is {style!r}; use one of {', '.join(STYLES)}")


def _reference(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise ValueError(
            f"prompt {prompt.index} has no answer; set answer_key or use another verifier"
        )
    return prompt.answer
