"""A judge of one's own: whether a response means the same as the reference, asked both ways round.

data:
  verifier: examples/judge/paraphrases.py:paraphrases
  verifier_options: {servers: [http://judge-0:8000], model: Qwen3-32B}
  verifier_timeout: 600
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.judge_servers import JudgeError, JudgeRequest, JudgeServers


class Comparison(BaseModel):
    """The judge's answer."""

    model_config = ConfigDict(extra="forbid")

    means_the_same: bool


@functools.cache  # the servers' state and the answers are kept between batches
def judge(servers: tuple[str, ...], model: str) -> JudgeServers:
    """The model behind these servers."""
    return JudgeServers(servers, model, time_limit=590.0)


async def paraphrases(
    responses: Sequence[str], prompts: Sequence[Prompt], *, servers: Sequence[str], model: str
) -> list[float | JudgeError]:
    """1 if both answers are yes, 0.5 for one of them; a JudgeError leaves a response out."""
    requests = []
    for response, prompt in zip(responses, prompts, strict=True):
        requests.append(comparison(response, str(prompt.answer)))
        requests.append(comparison(str(prompt.answer), response))
    answers = await judge(tuple(servers), model).ask(requests)
    return [
        mean_of(first, second) for first, second in zip(answers[::2], answers[1::2], strict=True)
    ]


def comparison(first: str, second: str) -> JudgeRequest[Comparison]:
    """The question about two texts."""
    text = f"Do these two texts mean the same?\n\n# First\n\n{first}\n\n# Second\n\n{second}"
    return JudgeRequest([{"role": "user", "content": text}], Comparison)


def mean_of(first: Comparison | JudgeError, second: Comparison | JudgeError) -> float | JudgeError:
    """The reward of two answers."""
    if isinstance(first, JudgeError):
        return first
    if isinstance(second, JudgeError):
        return second
    return (first.means_the_same + second.means_the_same) / 2
