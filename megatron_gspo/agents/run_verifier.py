"""Scores runs with the verifier of the config, from their messages and their directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_gspo.agents.agent_run import AgentRun
from megatron_gspo.agents.agent_session import Judge, Outcome
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.scorer import RewardScorer
from megatron_gspo.rollout.batched_calls import BatchedCalls


class RunVerifier:
    """Runs that end at the same time are scored together, in the verifier's workers."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self._calls = BatchedCalls(self._outcomes, "agent-verifier")

    def judge_of(self, prompt: Prompt) -> Judge:
        """The judge of a run of this prompt. The verifier gets the content of the last reply, and
        in the prompt's metadata `messages`, all of the last call, and `directory`, where the agent
        has worked, unless a runner has played it."""

        async def judge(run: AgentRun, directory: Path | None) -> Outcome:
            messages = run.tree.delivered[-1].messages
            seen: dict[str, Any] = {"messages": [message.record() for message in messages]}
            if directory is not None:
                seen["directory"] = str(directory)
            asked = replace(prompt, metadata={**prompt.metadata, **seen})
            return await self._calls.call((messages[-1].content, asked))

        return judge

    def close(self) -> None:
        """End the verifier's processes. May be called again."""
        self._calls.close()
        self._scorer.close()

    def _outcomes(self, requests: Sequence[tuple[str, Prompt]]) -> list[Outcome]:
        scores = self._scorer.score_texts(requests)
        return [
            Outcome(reward, failure)
            for reward, failure in zip(scores.rewards.tolist(), scores.failures, strict=True)
        ]
