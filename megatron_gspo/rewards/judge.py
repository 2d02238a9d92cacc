"""Rewards of a model that reads the responses: a score of each, or a ranking of those to a prompt.

See `judge_servers` for how the model is asked. A response without an answer gets the reason in
place of a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, conint, conlist, create_model, field_validator

from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.judge_servers import JudgeError, JudgeRequest, JudgeServers

SCORE_TEMPLATE = "# Question\n\n{question}\n\n{reference}# Response\n\n{response}"
RANKING_TEMPLATE = "# Question\n\n{question}\n\n{reference}{responses}"
_FIELD = re.compile(r"\{(\w+)\}")
_EQUAL_SCORE = 0.5  # where nothing is to be ranked


class Verdict(BaseModel):
    """The answer of a judge about a response."""

    model_config = ConfigDict(extra="forbid")

    reason: str
    score: Annotated[float, Ge(0), Le(1)]


class Judge:
    """The judge's score of each response. See `make_judge`."""

    takes_batch = True

    def __init__(
        self, servers: JudgeServers, instructions: str, template: str, verdict: type[BaseModel]
    ) -> None:
        """verdict: has a number or a truth value `score`, as a field or a property."""
        self.description = servers.description
        self._servers = servers
        self._instructions = instructions
        self._template = template
        self._verdict = verdict

    def __call__(
        self, responses: Sequence[str], prompts: Sequence[Prompt]
    ) -> list[float | Exception]:
        """A reward for each response, or why it has none."""
        requests: dict[int, JudgeRequest[Any]] = {}
        rewards: dict[int, float | Exception] = {}
        for i, (response, prompt) in enumerate(zip(responses, prompts, strict=True)):
            try:
                text = filled(self._template, prompt, response=response)
                requests[i] = JudgeRequest(messages_of(self._instructions, text), self._verdict)
            except JudgeError as error:
                rewards[i] = error
        answers = asyncio.run(self._servers.ask(list(requests.values())))
        for i, answer in zip(requests, answers, strict=True):
            rewards[i] = answer if isinstance(answer, JudgeError) else float(answer.score)
        return [rewards[i] for i in range(len(responses))]


class RankingJudge:
    """The judge ranks the responses to a prompt: 1 for the best, 0 for the worst, the others evenly
    between. See `make_judge_ranking`.

    Equal responses are one for the judge, and have the same reward. A prompt whose responses are all
    equal is not asked about. The order in which responses are shown depends on their texts alone.
    """

    takes_batch = True

    def __init__(self, servers: JudgeServers, instructions: str, template: str) -> None:
        self.description = servers.description
        self._servers = servers
        self._instructions = instructions
        self._template = template

    def __call__(
        self, responses: Sequence[str], prompts: Sequence[Prompt]
    ) -> list[float | Exception]:
        """A reward for each response, or why it has none."""
        texts: dict[int, list[str]] = {}
        for response, prompt in zip(responses, prompts, strict=True):
            texts.setdefault(prompt.index, []).append(response)
        prompt_of_index = {prompt.index: prompt for prompt in prompts}
        shown = {index: sorted(set(of_prompt), key=_digest) for index, of_prompt in texts.items()}
        requests: dict[int, JudgeRequest[Any]] = {}
        scores: dict[int, Mapping[str, float] | JudgeError] = {}
        for index, candidates in shown.items():
            if len(candidates) == 1:
                scores[index] = {candidates[0]: _EQUAL_SCORE}
                continue
            try:
                requests[index] = self._request(prompt_of_index[index], candidates)
            except JudgeError as error:
                scores[index] = error
        answers = asyncio.run(self._servers.ask(list(requests.values())))
        for index, answer in zip(requests, answers, strict=True):
            scores[index] = answer
            if not isinstance(answer, JudgeError):
                scores[index] = scores_of_ranking(answer.best_to_worst, shown[index])
        rewards: list[float | Exception] = []
        for response, prompt in zip(responses, prompts, strict=True):
            score = scores[prompt.index]
            rewards.append(score if isinstance(score, JudgeError) else score[response])
        return rewards

    def _request(self, prompt: Prompt, candidates: Sequence[str]) -> JudgeRequest[Any]:
        responses = "\n\n".join(
            f"# Response {number}\n\n{text}" for number, text in enumerate(candidates, start=1)
        )
        text = filled(self._template, prompt, responses=responses)
        messages = messages_of(self._instructions, text)
        return JudgeRequest(messages, ranking_of(len(candidates)))


def scores_of_ranking(best_to_worst: Sequence[int], candidates: Sequence[str]) -> dict[str, float]:
    """1 for the best of k >= 2 candidates, 0 for the worst, steps of 1 / (k - 1).

    best_to_worst: their numbers, from 1.
    """
    last = len(candidates) - 1
    return {
        candidates[number - 1]: (last - rank) / last for rank, number in enumerate(best_to_worst)
    }


def ranking_of(count: int) -> type[BaseModel]:
    """The answer that ranks `count` responses: each number once."""

    def check_each_once(numbers: list[int]) -> list[int]:
        if sorted(numbers) != list(range(1, count + 1)):
            raise ValueError(f"must have each number from 1 to {count} once, has {numbers}")
        return numbers

    numbers = conlist(conint(ge=1, le=count), min_length=count, max_length=count)
    return create_model(
        "Ranking",
        __config__=ConfigDict(extra="forbid"),
        __validators__={"each_once": field_validator("best_to_worst")(check_each_once)},
        reason=(str, ...),
        best_to_worst=(numbers, ...),
    )


def filled(template: str, prompt: Prompt, **fields: str) -> str:
    """The template with its names in braces replaced: `question`, `answer`, `reference` (a section
    with the answer, empty without one), the given fields, and fields of the prompt's row.

    Raises JudgeError for a name without a value.
    """
    known: dict[str, Any] = {**prompt.metadata, **fields, "question": question_of(prompt)}
    known["reference"] = ""
    if prompt.answer is not None:
        known["answer"] = prompt.answer
        known["reference"] = f"# Reference answer\n\n{prompt.answer}\n\n"

    def value(match: re.Match[str]) -> str:
        if match[1] not in known:
            names = ", ".join(sorted(known))
            raise JudgeError(
                f"prompt {prompt.index} has no {match[1]!r}, which verifier_options.template names;"
                f" it has {names}"
            )
        return str(known[match[1]])

    return _FIELD.sub(value, template)


def question_of(prompt: Prompt) -> str:
    """The text of the prompt's message; of several, each after its role."""
    contents = [str(message.get("content") or "") for message in prompt.messages]
    if len(contents) == 1:
        return contents[0]
    return "\n\n".join(
        f"{message['role']}: {content}"
        for message, content in zip(prompt.messages, contents, strict=True)
    )


def messages_of(instructions: str, text: str) -> list[dict[str, str]]:
    """The messages of a request."""
    return [{"role": "system", "content": instructions}, {"role": "user", "content": text}]


def _digest(text: str) -> bytes:
    return hashlib.sha256(json.dumps(text).encode()).digest()
