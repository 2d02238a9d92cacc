"""`ConfigError`, the only exception that the config raises."""

from __future__ import annotations

import json

from megatron_gspo.errors import InputError


class ConfigError(InputError):
    """An invalid config. Its text is one line: key, value, problem, fix."""

    label = "config error"

    def __init__(self, key: str, value: object, problem: str, fix: str) -> None:
        self.key = key
        self.value = value
        self.problem = problem
        self.fix = fix
        shown = f"{key} = {show(value)}" if value is not MISSING else key
        super().__init__(" ".join(f"{shown}: {problem}; {fix}".split()))


MISSING = object()  # the `value` of a ConfigError that has no value to show


def show(value: object) -> str:
    """A value in YAML's spelling, on one line, cut at 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
