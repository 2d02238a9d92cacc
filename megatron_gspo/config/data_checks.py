"""Checks of prompts, their format and the verifier. Each raises ConfigError."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gspo.config.code_section import COMPILE_SECONDS
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.data_sections import (
    JUDGE_GRACE,
    JUDGE_REQUEST_SECONDS,
    JUDGES,
    DataConfig,
)
from megatron_gspo.config.prompt_paths import matching_paths
from megatron_gspo.config.server_urls import check_url, without_password
from megatron_gspo.user_code import is_import_path

METRIC_NAME = re.compile(r"[A-Za-z0-9_-]+")
VERIFIERS = ("exact_match", "math_verify", "reasoning_gym", "code", *JUDGES, "reward_model")
# Arguments of `apply_chat_template` that are not the template's, and what sets them.
_OF_OTHER_KEYS = {
    "add_generation_prompt": "set data.last_assistant_message",
    "chat_template": "change the tokenizer's template in model.path",
    "continue_final_message": "set data.last_assistant_message",
    "conversation": "set data.prompt_key",
    "max_length": "set data.max_prompt_length",
    "messages": "set data.prompt_key",
    "padding": "remove it",
    "return_assistant_tokens_mask": "remove it",
    "return_dict": "remove it",
    "return_tensors": "remove it",
    "tokenize": "remove it",
    "tokenizer_kwargs": "remove it",
    "tools": "give each row a field tools",
    "truncation": "set data.overlong_prompts",
}


def check_data(data: DataConfig, *, scored_by_agents: bool = False) -> None:
    """Each source has prompts, a verifier that can score them, and a format that keeps the
    question.

    scored_by_agents: whether agents or an environment may give the rewards, so that a verifier
    needs no reference answers.
    """
    _check_sources(data)
    for name, source in data.by_source.items():
        with _of_source(name):
            _check_source(source)
            if not scored_by_agents:
                _check_reference_answers(source)


def _check_sources(data: DataConfig) -> None:
    if not data.sources:
        return
    for key in ("prompts", "task", "eval_prompts"):
        if getattr(data, key) is not None:
            problem = "and data.sources both give prompts"
            raise ConfigError(f"data.{key}", getattr(data, key), problem, "move it into a source")
    names = Counter(source.name for source in data.sources)
    for name, count in names.items():
        if not METRIC_NAME.fullmatch(name):
            problem = "is no name for metrics"
            fix = "use letters, digits, - and _"
            raise ConfigError("data.sources.name", name, problem, fix)
        if count > 1:
            raise ConfigError("data.sources.name", name, "names two sources", "rename one of them")


def check_evaluation_verifier(data: DataConfig) -> None:
    """The verifier of held-out responses can score those of each source.

    data: `Config.evaluation_data`.
    """
    for name, source in data.by_source.items():
        with _of_source(name), _of_evaluation():
            _check_verifier(source)
            _check_reference_answers(source)


@contextmanager
def _of_source(name: str) -> Iterator[None]:
    """Errors of `data` in the context name the source that they are about."""
    with _renamed("data.", f"data.sources.{name}." if name else "data."):
        yield


@contextmanager
def _of_evaluation() -> Iterator[None]:
    """Errors of the verifier in the context name that of held-out responses."""
    with _renamed("data.verifier", "evaluation.verifier"):
        yield


@contextmanager
def _renamed(start: str, name: str) -> Iterator[None]:
    """Errors of keys with this start in the context have another name for it."""
    try:
        yield
    except ConfigError as error:
        if not error.key.startswith(start):
            raise
        key = name + error.key.removeprefix(start)
        raise ConfigError(key, error.value, error.problem, error.fix) from None


def _check_source(data: DataConfig) -> None:
    for key, paths in (("prompts", data.prompts), ("eval_prompts", data.eval_prompts)):
        if paths == () or paths == "":
            raise ConfigError(f"data.{key}", paths, "names no file", "name one, or set it to null")
    if (data.prompts is None) == (data.task is None):
        problem = "the prompts come from exactly one of data.prompts and data.task"
        raise ConfigError("data.prompts", data.prompts, problem, "set one and leave the other null")
    _check_verifier(data)
    check_prompt_format(data)


def check_prompt_format(data: DataConfig) -> None:
    """The template keeps the question, and what only a chat template writes has one."""
    if "{question}" not in data.prompt_template:
        fix = "put {question} where the question goes"
        raise ConfigError(
            "data.prompt_template", data.prompt_template, "would drop the question", fix
        )
    if data.system_prompt is not None and not data.chat_template:
        fix = "set data.chat_template: true, or write it into data.prompt_template"
        raise ConfigError("data.system_prompt", data.system_prompt, "needs the chat template", fix)
    if data.system_prompt_key is not None and not data.chat_template:
        fix = "set data.chat_template: true"
        raise ConfigError(
            "data.system_prompt_key", data.system_prompt_key, "needs the chat template", fix
        )
    if data.system_prompt_key is not None and data.system_prompt is not None:
        problem = "and data.system_prompt both give the system message"
        raise ConfigError(
            "data.system_prompt_key", data.system_prompt_key, problem, "set one of them"
        )
    if data.chat_template_options and not data.chat_template:
        fix = "set data.chat_template: true"
        raise ConfigError(
            "data.chat_template_options", data.chat_template_options, "needs the chat template", fix
        )
    for name in sorted(_OF_OTHER_KEYS.keys() & data.chat_template_options.keys()):
        value = data.chat_template_options[name]
        raise ConfigError(
            f"data.chat_template_options.{name}",
            value,
            "is no option of a template",
            _OF_OTHER_KEYS[name],
        )


def _check_verifier(data: DataConfig) -> None:
    verifier = data.resolved_verifier
    if verifier == "reasoning_gym" and data.task is None:
        fix = f"set data.task, or one of {', '.join(VERIFIERS[:2])}, file.py:function"
        raise ConfigError("data.verifier", verifier, "needs data.task", fix)
    if verifier not in VERIFIERS and not is_import_path(verifier):
        fix = (
            f"set one of {', '.join(VERIFIERS)}, path/to/file.py:function or"
            " package.module:function"
        )
        raise ConfigError("data.verifier", verifier, "is not a verifier", fix)
    if verifier == "code":
        _check_code(data)
    if verifier in JUDGES:
        _check_judge(data)
    if verifier == "reward_model" and data.verifier_timeout is not None:
        problem = "has no meaning for reward_model, which runs in the training process"
        raise ConfigError("data.verifier_timeout", data.verifier_timeout, problem, "set it to null")


def _check_reference_answers(data: DataConfig) -> None:
    verifier = data.resolved_verifier
    answer = data.answer_key is not None or data.last_assistant_message == "answer"
    if verifier in VERIFIERS[:2] and not answer and data.task is None:
        fix = "name the field with the reference answer"
        raise ConfigError("data.answer_key", None, f"the verifier {verifier} compares with it", fix)


def _check_code(data: DataConfig) -> None:
    """The verifier `code` runs in workers, with time for at least two tests."""
    if data.verifier_options:
        raise ConfigError(
            "data.verifier_options",
            data.verifier_options,
            "is not read by the verifier code",
            "set the keys of data.code",
        )
    needed = 2 * data.code.wall_limit + 1.0
    if data.code.language == "cpp":
        needed += COMPILE_SECONDS
    if data.verifier_timeout is None or data.verifier_timeout < needed:
        problem = "ends a verification before two programs at the time limit end"
        raise ConfigError(
            "data.verifier_timeout",
            data.verifier_timeout,
            problem,
            f"set at least {needed:g}, or a lower data.code.time_limit",
        )
    if data.code.sandbox_url is not None:
        try:
            check_url(data.code.sandbox_url)
        except ValueError:
            shown = without_password(data.code.sandbox_url)
            raise ConfigError(
                "data.code.sandbox_url",
                shown,
                "is not the address of a server",
                "give http://host:port, without user, path or query",
            ) from None


def _check_judge(data: DataConfig) -> None:
    """A batch has time for at least one request."""
    request_timeout = data.verifier_options.get("request_timeout", JUDGE_REQUEST_SECONDS)
    if not isinstance(request_timeout, (int, float)) or request_timeout <= 0:
        key = "data.verifier_options.request_timeout"
        raise ConfigError(key, request_timeout, "is no number of seconds", "set one above 0")
    needed = request_timeout + JUDGE_GRACE
    if data.verifier_timeout is None or data.verifier_timeout < needed:
        problem = "is the limit for all requests of a batch, and ends it before one of them"
        fix = f"set at least {needed:g}, or a lower verifier_options.request_timeout"
        raise ConfigError("data.verifier_timeout", data.verifier_timeout, problem, fix)


def check_data_files(data: DataConfig) -> None:
    """The prompt files and the verifiers' files exist."""
    for name, source in data.by_source.items():
        with _of_source(name):
            _check_prompt_files(source)
            _check_verifier_file(source)


def check_evaluation_verifier_file(data: DataConfig) -> None:
    """The file of the verifier of held-out responses exists. data: `Config.evaluation_data`."""
    for source in data.by_source.values():
        with _of_evaluation():
            _check_verifier_file(source)


def _check_prompt_files(data: DataConfig) -> None:
    for key, paths in (("prompts", data.prompt_paths), ("eval_prompts", data.eval_prompt_paths)):
        for path in paths:
            if not matching_paths(path):
                fix = "give a path relative to the working directory, or an absolute one"
                raise ConfigError(f"data.{key}", path, "no such file", fix)


def _check_verifier_file(data: DataConfig) -> None:
    file, _, _ = data.resolved_verifier.rpartition(":")
    if file.endswith(".py") and not Path(file).is_file():
        fix = "give its path, then :function"
        raise ConfigError("data.verifier", data.verifier, f"no such file: {file}", fix)
