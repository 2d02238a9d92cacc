"""Reward functions of other libraries as verifiers, told by the names of their parameters.

| library | signature | gets |
| --- | --- | --- |
| ours | `(response, prompt, **options)` | the response and its `Prompt` |
| ours, a batch | `(responses, prompts, **options) -> list` | all responses of a batch, their `Prompt`s |
| verl | `(data_source, solution_str, ground_truth, extra_info, **options)` | the fields of the row |
| TRL | `(prompts, completions, **columns) -> list` | lists of one element, texts |

A function may be asynchronous. One of another signature is refused when it is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megatron_gspo.data.sample import Prompt

RewardFunction = Callable[..., Any]
Options = Mapping[str, Any]
Parameters = Mapping[str, inspect.Parameter]

_TAKEN = (
    "a verifier takes (response, prompt), (responses, prompts), verl's (data_source, solution_str, ground_truth,"
    " extra_info) or TRL's (prompts, completions, **kwargs)"
)
_VERL_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}
# That only TRL can give.
_TRL_ARGUMENTS = {"completion_ids", "trainer_state", "log_extra", "log_metric"}
_ANSWER_NAMES = {"answer", "ground_truth", "label", "reference", "solution"}


class SignatureError(Exception):
    """A function that can't be called as a verifier: what is wrong with it, in one line without
    its name.
    """


def as_verifier(function: RewardFunction, options: Options) -> RewardFunction:
    """The function as `verifier(response, prompt)`, or with the attribute `takes_batch` as
    `verifier(responses, prompts)`. options: keyword arguments of every call.

    Raises SignatureError.
    """
    if inspect.isclass(function):
        raise SignatureError(f"it is a class and must be a function; {_TAKEN}")
    parameters: Parameters = {}
    with contextlib.suppress(TypeError, ValueError):  # of a function in C
        parameters = inspect.signature(function).parameters
    takes_batch = list(parameters)[:2] == ["responses", "prompts"]
    if {"solution_str", "ground_truth"} <= parameters.keys():
        call = _from_verl(function, parameters, options)
    elif "completions" in parameters:
        call = _from_trl(function, parameters, options)
    else:
        call = _from_ours(function, parameters, options)

    def verify(text: object, prompt: object) -> object:
        reward = call(text, prompt)
        if inspect.isawaitable(reward):
            return asyncio.run(_result(reward))
        return reward

    verify.takes_batch = takes_batch  # type: ignore[attr-defined]
    return verify


async def _result(reward: Awaitable[object]) -> object:
    return await reward


def _from_ours(
    function: RewardFunction, parameters: Parameters, options: Options
) -> RewardFunction:
    if parameters:
        try:
            inspect.signature(function).bind("", None, **options)
        except TypeError as error:
            shown = ", ".join(map(str, parameters.values()))
            raise SignatureError(
                f"it takes ({shown}) ({error}); {_TAKEN}, and verifier_options"
            ) from None
        names = list(parameters)
        if names[:2] in (["args", "sample"], ["args", "samples"]):
            raise SignatureError(
                f"it is slime's custom_rm, whose arguments do not exist here; {_TAKEN}"
            )
        if len(names) > 1 and names[1] in _ANSWER_NAMES:
            raise SignatureError(
                f"its parameter {names[1]!r} would be the Prompt: call it prompt and read"
                " prompt.answer"
            )
    return lambda text, prompt: function(text, prompt, **options)


def _from_verl(
    function: RewardFunction, parameters: Parameters, options: Options
) -> RewardFunction:
    _check_options(parameters, options)
    for name in _required(parameters):
        if name not in _VERL_ARGUMENTS and name not in options:
            raise SignatureError(
                f"nothing gives its parameter {name!r}; set it in verifier_options"
            )

    def call(text: str, prompt: Prompt) -> object:
        row = prompt.metadata
        answer: object = prompt.answer
        if answer is None and isinstance(row.get("reward_model"), dict):
            answer = row["reward_model"].get("ground_truth")
        arguments = {
            "data_source": row.get("data_source", ""),
            "solution_str": text,
            "ground_truth": answer,
            "extra_info": dict(row.get("extra_info") or {}),
        }
        return function(**_accepted(arguments, parameters), **options)

    return call


def _from_trl(function: RewardFunction, parameters: Parameters, options: Options) -> RewardFunction:
    _check_options(parameters, options)
    required = _required(parameters)
    for name in required:
        if name in _TRL_ARGUMENTS:
            raise SignatureError(f"only TRL has its argument {name!r}; give it a default")

    async def single(rewards: object) -> object:
        if inspect.isawaitable(rewards):
            rewards = await rewards
        if not isinstance(rewards, (list, tuple)) or len(rewards) != 1:
            raise ValueError(
                f"it returned {rewards!r} for one completion; return a list of one number"
            )
        return rewards[0]

    def call(text: str, prompt: Prompt) -> object:
        columns: dict[str, object] = {"answer": prompt.answer, **prompt.metadata}
        for name in required:
            columns.setdefault(name, prompt.answer)  # data.answer_key's column
        columns["prompts"] = prompt.text
        columns["completions"] = text
        lists = {name: [value] for name, value in columns.items() if name not in options}
        return single(function(**_accepted(lists, parameters), **options))

    return call


def _accepted(arguments: Mapping[str, object], parameters: Parameters) -> dict[str, object]:
    """The arguments that a function with these parameters takes."""
    takes_any = _takes_any(parameters)
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def _check_options(parameters: Parameters, options: Options) -> None:
    unknown = sorted(options.keys() - parameters.keys())
    if unknown and not _takes_any(parameters):
        raise SignatureError(f"it has no parameter {unknown[0]!r}, which verifier_options set")


def _takes_any(parameters: Parameters) -> bool:
    kinds = [parameter.kind for parameter in parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _required(parameters: Parameters) -> list[str]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
