"""Scores of one model on one task, from its kept responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.rollout.pass_at_k import prompt_pass_at_k
from megatron_gspo.tools.compare.statistics import Interval, bootstrap_interval
from megatron_gspo.tools.evaluate.task_files import Task


@dataclass(frozen=True)
class TaskScores:
    """Scores of `prompts` x `samples` responses.

    label, step: of the model. accuracy: mean@n, the mean reward. pass_at_k: by k.
    response_length: mean, tokens. truncated: share that reached the maximum length. failures:
    responses without a score, which count as not solved. left_out: rows of the file that were not
    evaluated, by reason. difference: accuracy less that of the first model, paired by prompt; None
    for the first. Intervals are 95 %, of the bootstrap over prompts.
    """

    task: str
    label: str
    step: int | None
    verifier: str
    prompts: int
    samples: int
    accuracy: Interval
    pass_at_k: dict[int, Interval]
    response_length: float
    truncated: float
    failures: int
    left_out: dict[str, int]
    difference: Interval | None = None


def default_k(samples: int) -> tuple[int, ...]:
    """The reported k of pass@k where none is configured: powers of two and `samples`."""
    return tuple(sorted({2**i for i in range(samples.bit_length())} | {samples}))


def score_task(
    task: Task,
    label: str,
    step: int | None,
    records: Mapping[int, Sequence[Mapping[str, Any]]],
    ks: Sequence[int] = (),
    first: np.ndarray | None = None,
) -> TaskScores:
    """Scores from the records of all prompts. ks: of pass@k; empty: `default_k`. first:
    `prompt_accuracy` of the first model, None for itself."""
    groups = [records[prompt.index] for prompt in task.prompts]
    rewards = reward_table(groups)
    flat = [record for group in groups for record in group]
    own = prompt_accuracy(rewards)
    return TaskScores(
        task=task.name,
        label=label,
        step=step,
        verifier=task.data.resolved_verifier,
        prompts=len(rewards),
        samples=rewards.shape[1],
        accuracy=bootstrap_interval(own),
        pass_at_k={
            k: bootstrap_interval(prompt_pass_at_k(rewards, k))
            for k in ks or default_k(rewards.shape[1])
        },
        response_length=float(np.mean([record["response_length"] for record in flat])),
        truncated=float(np.mean([record["finish_reason"] == "length" for record in flat])),
        failures=sum(FAILURE in record["metadata"] for record in flat),
        left_out=dict(task.left_out),
        difference=None if first is None else bootstrap_interval(own - first),
    )


def reward_table(groups: Sequence[Sequence[Mapping[str, Any]]]) -> np.ndarray:
    """[prompts, samples] float64 rewards of the groups; a response without a score counts as
    not solved, 0.
    """
    rewards = np.array(
        [[record["reward"] for record in group] for group in groups], dtype=np.float64
    )
    return np.nan_to_num(rewards, nan=0.0)


def prompt_accuracy(rewards: np.ndarray) -> np.ndarray:
    """[prompts]: the mean reward of each prompt's responses."""
    return rewards.mean(axis=1)
