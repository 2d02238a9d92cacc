"""Runs of agents that begin before the updates of the step before: an agent that leaves a file once
its first call is answered, and a callback that waits for such a file of the next batch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from examples.agents.spell_backward import chat
from megatron_gspo.agents.agent_function import AgentTask
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop.callbacks import Callback
from megatron_gspo.loop.setup import Components

FOLDER = "AGENT_MARKS"
"""Key of `agents.env`: the folder of these files."""

_SECONDS = 120.0


def marking(task: AgentTask) -> float:
    """Two calls of one conversation."""
    question = {"role": "user", "content": task.prompt}
    reply = chat(task, [question])
    (Path(os.environ[FOLDER]) / uuid4().hex).touch()
    answer = chat(task, [question, reply, {"role": "user", "content": "\nagain "}])
    return len(answer["content"]) / 6


class NextBatchHasBegun(Callback):
    """Lets a step's updates begin when a run of the next step has had a call answered."""

    def start(self, run: Components, step: int) -> None:
        config = run.config
        self._marks = Path(config.agents.env[FOLDER])
        self._runs = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        self._steps = config.training.steps

    def after_rollout(self, step: int, batch: SampleBatch) -> Mapping[str, float]:
        deadline = time.monotonic() + _SECONDS
        while step + 1 < self._steps and len(os.listdir(self._marks)) <= (step + 1) * self._runs:
            assert time.monotonic() < deadline, "no run of the next step begins"
            time.sleep(0.01)
        return {}
