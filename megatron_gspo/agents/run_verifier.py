"""Scores runs with the verifier of the config, from their messages and their directory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_gspo.agents.agent_run import AgentRun
from megatron_gspo.agents.agent_session import Judge, Outcome
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.scorer import RewardScorer


@dataclass(eq=False)
class _WaitingRun:
    text: str
    prompt: Prompt
    outcome: asyncio.Future[Outcome]


class RunVerifier:
    """Runs that end at the same time are scored together, in the verifier's workers."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self._waiting: list[_WaitingRun] = []
        self._scoring: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="agent-verifier")

    def judge_of(self, prompt: Prompt) -> Judge:
        """The judge of a run of this prompt. The verifier gets the content of the last reply, and
        in the prompt's metadata `messages`, all of the last call, and `directory`, where the agent
        has worked."""

        async def judge(run: AgentRun, directory: Path) -> Outcome:
            messages = run.tree.delivered[-1].messages
            seen = {
                "messages": [message.record() for message in messages],
                "directory": str(directory),
            }
            asked = replace(prompt, metadata={**prompt.metadata, **seen})
            return await self._outcome(messages[-1].content, asked)

        return judge

    def close(self) -> None:
        """End the verifier's processes. May be called again."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._scorer.close()

    async def _outcome(self, text: str, prompt: Prompt) -> Outcome:
        loop = asyncio.get_running_loop()
        waiting = _WaitingRun(text, prompt, loop.create_future())
        self._waiting.append(waiting)
        if self._scoring is None or self._scoring.done():
            self._scoring = loop.create_task(self._score())
        return await waiting.outcome

    async def _score(self) -> None:
        """Score runs until none waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            runs = self._waiting
            self._waiting = []
            requests = [(run.text, run.prompt) for run in runs]
            scores = await loop.run_in_executor(self._executor, self._scorer.score_texts, requests)
            for run, reward, status, message in zip(
                runs, scores.rewards.tolist(), scores.statuses, scores.messages, strict=True
            ):
                if not run.outcome.done():
                    failure = "" if status == "ok" else f"{status}: {message}"
                    run.outcome.set_result(Outcome(reward, failure))
