"""Checks of prompts, their format and the verifier. Each raises ConfigError."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config.code_section import COMPILE_SECONDS
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.data_sections import DataConfig
from megatron_gspo.config.server_urls import check_url, without_password

VERIFIERS = ("exact_match", "math_verify", "reasoning_gym", "code")


def check_data(data: DataConfig) -> None:
    """One source of prompts, a verifier that can score them, and a format that keeps the question."""
    if (data.prompts is None) == (data.task is None):
        problem = "the prompts come from exactly one of data.prompts and data.task"
        raise ConfigError("data.prompts", data.prompts, problem, "set one and leave the other null")
    _check_verifier(data)
    if data.resolved_verifier == "code":
        _check_code(data)
    check_prompt_format(data)


def check_prompt_format(data: DataConfig) -> None:
    """The template keeps the question, and a system prompt has a chat template."""
    if "{question}" not in data.prompt_template:
        fix = "put {question} where the question goes"
        raise ConfigError("data.prompt_template", data.prompt_template, "would drop the question", fix)
    if data.system_prompt is not None and not data.chat_template:
        fix = "set data.chat_template: true, or write it into data.prompt_template"
        raise ConfigError("data.system_prompt", data.system_prompt, "needs the chat template", fix)


def _check_verifier(data: DataConfig) -> None:
    verifier = data.resolved_verifier
    if verifier == "reasoning_gym" and data.task is None:
        fix = f"set data.task, or one of {', '.join(VERIFIERS[:2])}, file.py:function"
        raise ConfigError("data.verifier", verifier, "needs data.task", fix)
    place, _, function = verifier.rpartition(":")
    named = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if verifier not in VERIFIERS and not (named and function.isidentifier()):
        fix = f"set one of {', '.join(VERIFIERS)}, path/to/file.py:function or package.module:function"
        raise ConfigError("data.verifier", verifier, "is not a verifier", fix)
    if verifier in VERIFIERS[:2] and data.answer_key is None and data.task is None:
        fix = "name the field with the reference answer"
        raise ConfigError("data.answer_key", None, f"the verifier {verifier} compares with it", fix)


def _check_code(data: DataConfig) -> None:
    """The verifier `code` runs in workers, with time for at least two tests."""
    if data.verifier_options:
        raise ConfigError("data.verifier_options", data.verifier_options, "is not read by the verifier code",
                          "set the keys of data.code")  # fmt: skip
    needed = 2 * data.code.wall_limit + 1.0 + (COMPILE_SECONDS if data.code.language == "cpp" else 0.0)
    if data.verifier_timeout is None or data.verifier_timeout < needed:
        problem = "ends a verification before two programs at the time limit end"
        raise ConfigError("data.verifier_timeout", data.verifier_timeout, problem,
                          f"set at least {needed:g}, or a lower data.code.time_limit")  # fmt: skip
    if data.code.sandbox_url is not None:
        try:
            check_url(data.code.sandbox_url)
        except ValueError:
            shown = without_password(data.code.sandbox_url)
            raise ConfigError("data.code.sandbox_url", shown, "is not the address of a server",
                              "give http://host:port, without user, path or query") from None  # fmt: skip


def check_data_files(data: DataConfig) -> None:
    """The prompt files and the verifier's file exist."""
    for key in ("prompts", "eval_prompts"):
        path = getattr(data, key)
        if path is not None and not Path(path).exists():
            fix = "give a path relative to the working directory, or an absolute one"
            raise ConfigError(f"data.{key}", path, "no such file", fix)
    file, _, _ = data.resolved_verifier.rpartition(":")
    if file.endswith(".py") and not Path(file).is_file():
        fix = "give its path, then :function"
        raise ConfigError("data.verifier", data.verifier, f"no such file: {file}", fix)
