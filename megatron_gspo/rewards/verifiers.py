"""Verifiers: functions that score a response. Built in or the user's own, by name."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_gspo.data.prompt_files import optional_module
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import InputError
from megatron_gspo.rewards.answer_extraction import STYLES, equal_answers, extract_answer

Verifier = Callable[[str, Prompt], float]
"""verifier(response_text, prompt) -> reward, a finite number. It may raise; `RewardScorer` counts it.

Its attribute `description`, if it has one, is a line that a run prints at its start."""


class VerifierError(InputError):
    """A verifier that can't be loaded; one line naming it and the fix."""


def load_verifier(name: str, options: dict[str, Any] | None = None) -> Verifier:
    """The verifier of that name.

    name: exact_match, math_verify, reasoning_gym, code, "path/to/file.py:function" or "package.module:function".
    options: for built-in ones the keyword arguments of the `make_...` function below; for others keyword arguments of
        every call.
    Raises VerifierError in one line if it can't be found or loaded; ImportError for a missing package.
    """
    options = options or {}
    if name in BUILT_IN:
        try:
            return BUILT_IN[name](**options)
        except TypeError as error:
            raise VerifierError(
                f"verifier {name}: options {options} don't fit ({error}); correct them"
            ) from error
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        known = ", ".join(BUILT_IN)
        raise VerifierError(f"verifier {name!r} is unknown; use {known}, file.py:function or module:function")
    verifier = load_function(name, "verifier", VerifierError)
    return functools.partial(verifier, **options) if options else verifier


def load_function(name: str, what: str, refusal: type[InputError]) -> Callable[..., Any]:
    """A user's function, "path/to/file.py:function" or "package.module:function".

    what: begins the message of a `refusal`, which is raised in one line if it can't be found or loaded.
    """
    place, _, function = name.rpartition(":")
    label = f"{what} {name!r}"
    load = _module_from_file if place.endswith(".py") else _module
    module = load(label, place, refusal)
    found = getattr(module, function, None)
    if found is None:
        raise refusal(f"{label}: {place} has no {function!r}; define it or correct the name")
    if not callable(found):
        raise refusal(f"{label}: {function!r} is a {type(found).__name__}; it must be a function")
    return found


def make_exact_match(style: str = "whole") -> Verifier:
    """1 if the response's answer (`extract_answer` style) equals prompt.answer (`equal_answers`), both stripped; else 0.

    The reference may be a whole solution: what is in the style's tags, box or after its #### is taken of it.
    """
    _check_style(style)

    def exact_match(text: str, prompt: Prompt) -> float:
        reference = _reference(prompt)
        reference_answer = extract_answer(reference, style) or reference.strip()
        answer = extract_answer(text, style)
        return float(answer is not None and equal_answers(answer, reference_answer, style))

    return exact_match


def make_math_verify() -> Verifier:
    """1 if `math-verify` finds the response's answer equal to prompt.answer; else 0. See `math_answers`."""
    optional_module("math_verify", "math-verify", "tasks", "verifier math_verify")
    from megatron_gspo.rewards.math_answers import equal_to_reference

    return lambda text, prompt: float(equal_to_reference(text, _reference(prompt)))


def make_reasoning_gym(style: str = "whole", partial_credit: bool = True) -> Verifier:
    """The task's own score (`score_answer`) of the response's answer, usually in [0, 1]; no answer scores 0.

    style: see `extract_answer`. partial_credit=False: 1 for a full score, else 0.
    """
    _check_style(style)
    from megatron_gspo.data.tasks import METADATA_KEY, create_dataset

    datasets: dict[str, Any] = {}

    def reasoning_gym(text: str, prompt: Prompt) -> float:
        if METADATA_KEY not in prompt.metadata:
            raise ValueError(f"prompt {prompt.index} is not from a reasoning-gym task; use another verifier")
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
    """Runs the response's program on the prompt's test cases in a sandbox; see `sandbox.code_verifier`."""
    from megatron_gspo.rewards.sandbox.code_verifier import CodeVerifier, SandboxError

    try:
        return CodeVerifier(**options)
    except SandboxError as error:
        raise VerifierError(f"verifier code: {error}") from error


BUILT_IN: dict[str, Callable[..., Verifier]] = {
    "exact_match": make_exact_match,
    "math_verify": make_math_verify,
    "reasoning_gym": make_reasoning_gym,
    "code": make_code,
}


def _check_style(style: str) -> None:
    if style not in STYLES:
        raise VerifierError(f"verifier style is {style!r}; use one of {', '.join(STYLES)}")


def _reference(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise ValueError(f"prompt {prompt.index} has no answer; set answer_key or use another verifier")
    return prompt.answer


def _module(label: str, module: str, refusal: type[InputError]) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module may fail in any way
        raise refusal(f"{label}: importing {module} failed ({_reason(error)}); fix it") from error


def _module_from_file(label: str, place: str, refusal: type[InputError]) -> Any:
    path = Path(place)
    if not path.is_file():
        raise refusal(f"{label}: no such file {path}; check the path (relative to {Path.cwd()})")
    path = path.resolve()
    unique = f"{label.partition(' ')[0]}_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may fail in any way
        del sys.modules[unique]
        raise refusal(f"{label}: running {path} failed ({_reason(error)}); fix it") from error
    return module


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
