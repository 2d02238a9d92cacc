"""The answer of a judge: grades in place of a number.

data:
  verifier: judge
  verifier_timeout: 600
  verifier_options:
    servers: [http://judge-0:8000]
    model: Qwen3-32B
    instructions: Name the facts in the answer that are wrong, then grade it.
    verdict: examples/judge/grade.py:Grade
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

_SCORES = {"good": 1.0, "fair": 0.4, "bad": 0.0}


class Grade(BaseModel):
    """What the judge writes, in this order; its JSON schema goes to the server."""

    model_config = ConfigDict(extra="forbid")  # OpenAI's servers require it

    wrong_facts: str
    grade: Literal["good", "fair", "bad"]

    @property
    def score(self) -> float:
        """The reward."""
        return _SCORES[self.grade]
