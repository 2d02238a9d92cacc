"""Refuses a run whose files the programs of a sandbox could read: its prompts have the expected
outputs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.command import SandboxError
from megatron_gspo.rewards.sandbox.isolation import find_interpreter


def refuse_visible_files(code: CodeConfig, paths: Mapping[str, object]) -> None:
    """Raises ConfigError for a path in or below one that programs may read: libraries, commands,
    the interpreter.

    paths: by their key; a path, several, or None. The directory of the process and its user's are
    among them.
    """
    if code.sandbox_url is not None:
        return
    try:
        readable = find_interpreter(code.python).readable
    except SandboxError:  # the verifier says so itself
        return
    visible = [os.path.realpath(path) for path in readable]
    checked = {
        **paths,
        "the working directory": os.getcwd(),
        "HOME": os.path.expanduser("~"),
    }
    for key, value in checked.items():
        for path in value if isinstance(value, (list, tuple)) else [value]:
            if path is None:
                continue
            file = Path(os.path.realpath(os.path.expandvars(os.path.expanduser(str(path)))))
            folder = next((folder for folder in visible if file.is_relative_to(folder)), None)
            if folder is not None:
                problem = f"the programs of the verifier code can read {folder}, and this with it"
                raise ConfigError(
                    key,
                    str(path),
                    problem,
                    "move it, or give another interpreter as data.code.python",
                )


def refuse_visible_run(config: Config) -> None:
    """Like `refuse_visible_files`, for a training run."""
    data = config.data
    paths: dict[str, object] = {"model.path": config.model.path, "run_dir": config.run_dir}
    for name, source in data.by_source.items():
        section = f"data.sources.{name}" if name else "data"
        paths[f"{section}.prompts"] = source.prompts
        paths[f"{section}.eval_prompts"] = source.eval_prompts
    if "code" in (*data.verifiers, config.evaluation.verifier):
        refuse_visible_files(data.code, paths)
