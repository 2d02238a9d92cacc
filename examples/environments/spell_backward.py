"""Spell a word backward in several tries: the environment repeats the wrong answer and the
question.

rollout:
  environment: examples/environments/spell_backward.py:spell_backward
  environment_options: {tries: 3}
"""

from __future__ import annotations

from megatron_gspo.data.sample import Prompt
from megatron_gspo.environments.environment import Turn


class SpellBackward:
    """One episode. `step` takes an answer."""

    def __init__(self, prompt: Prompt, tries: int, partial_credit: bool) -> None:
        self.question = prompt.text
        self.answer = prompt.answer or ""
        self.left = tries
        self.partial_credit = partial_credit

    def step(self, response: str) -> Turn:
        answer = response.strip()
        self.left -= 1
        if answer == self.answer:
            return Turn(reward=1.0, done=True)
        return Turn(f"\nnot {answer}\n{self.question}", self.credit(answer), done=self.left == 0)

    def credit(self, answer: str) -> float:
        """Half the share of letters in their right place, or 0."""
        if not self.partial_credit:
            return 0.0
        right = sum(a == b for a, b in zip(answer, self.answer, strict=False))
        return 0.5 * right / max(len(self.answer), len(answer))


def spell_backward(
    prompt: Prompt, *, sample_index: int, seed: int, tries: int = 3, partial_credit: bool = False
) -> SpellBackward:
    """The factory. sample_index and seed are not used: nothing is random."""
    return SpellBackward(prompt, tries, partial_credit)
