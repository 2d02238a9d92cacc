"""A reward of a whole batch: right answers, and among those to one prompt the shorter the better.

data:
  verifier: examples/own_code/batch_reward.py:brief_answers
  verifier_options: {bonus: 0.1}
  verifier_timeout: 60.0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_gspo.data.sample import Prompt


def brief_answers(
    responses: Sequence[str], prompts: Sequence[Prompt], *, bonus: float = 0.1
) -> list[float]:
    """1 for a right answer, and up to `bonus` more by its rank in length among the right answers to
    its prompt; 0 for a wrong one. An `async def` may await a judge for all of them at once.
    """
    right = defaultdict(list)
    for i, (response, prompt) in enumerate(zip(responses, prompts, strict=True)):
        if response.strip() == prompt.answer:
            right[prompt.index].append(i)
    rewards = [0.0] * len(responses)
    for positions in right.values():
        by_length = sorted(positions, key=lambda i: len(responses[i]))
        for rank, i in enumerate(by_length):
            rewards[i] = 1.0 + bonus * (1 - rank / len(by_length))
    return rewards
