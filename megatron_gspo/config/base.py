"""What every config section shares: strictness, and the one kind of error."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from megatron_gspo.errors import InputError


class ConfigError(InputError):
    """A config that cannot work. Its text is one line: key, value, what is wrong, the fix."""

    label = "config error"

    def __init__(self, key: str, value: Any, problem: str, fix: str) -> None:
        self.key, self.value, self.problem, self.fix = key, value, problem, fix
        shown = f"{key} = {show(value)}" if value is not MISSING else key
        super().__init__(" ".join(f"{shown}: {problem}; {fix}".split()))


MISSING = object()  # "no value to show" in a ConfigError


def show(value: Any) -> str:
    """A value as YAML would spell it, on one line, cut at 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


class Section(BaseModel):
    """Refuses unknown keys, coerces no type (but a whole number is a fine float), is frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
