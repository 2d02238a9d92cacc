"""Held-out accuracy: mean@k and pass@k under the current weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_gspo.config import Config, SamplingParams
from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.prompt_mix import MixedPrompts, of_each_source
from megatron_gspo.data.sample import Prompt
from megatron_gspo.loop.generation import rollout_seed
from megatron_gspo.loop.reward_scoring import Rewards, require_scores
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rewards.scorer import FAILURES
from megatron_gspo.rollout.group_source import GroupSource
from megatron_gspo.rollout.pass_at_k import mean_at_k, pass_at_k

# Differs from every training step's seed and is the same at every evaluation: two evaluations
# differ by the weights.
_EVALUATION_STREAM = 2**31 - 1


def evaluate(
    groups: GroupSource, rewards: Rewards, prompts: Sequence[Prompt], config: Config, timers: Timers
) -> dict[str, float]:
    """``eval/accuracy`` (mean@n), ``eval/pass@k`` and the response length on the held-out
    prompts.
    """
    evaluation = config.evaluation
    with timers("evaluate"):
        chosen = ChosenPrompts.by_index(prompts, range(len(prompts)))
        batch = groups.generate(
            chosen, evaluation_sampling(config), seed=evaluation_seed(config.seed)
        )
        batch, counts = rewards(batch, prompts, Timers())  # timed as part of the evaluation
    require_scores(batch, rewards.name, prompts)
    # a response that could not be scored counts as not solved
    scores = np.nan_to_num(batch.table["reward"], nan=0.0).reshape(-1, evaluation.n_samples)
    metrics = {
        "eval/accuracy": mean_at_k(scores),
        "eval/response_length": float(np.mean(batch.table["response_length"])),
        "eval/verifier_failures": float(sum(counts[name] for name in FAILURES)),
    }
    metrics |= {f"eval/pass@{k}": pass_at_k(scores, k) for k in evaluation.pass_at_k}
    if isinstance(prompts, MixedPrompts):
        for name, is_of_source in of_each_source(prompts, np.arange(len(prompts))).items():
            metrics[f"eval/accuracy/{name}"] = mean_at_k(scores[is_of_source])
    return metrics


def evaluation_seed(seed: int) -> int:
    """The sampling seed of every evaluation of runs with this ``seed``."""
    return rollout_seed(seed, _EVALUATION_STREAM)


def evaluation_sampling(config: Config) -> SamplingParams:
    """How held-out responses are drawn; a temperature of 0 is greedy."""
    evaluation = config.evaluation
    return replace(
        config.rollout,
        n_samples_per_prompt=evaluation.n_samples,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        min_p=0.0,
        max_support=0,
    )


def is_evaluation_due(config: Config, step: int) -> bool:
    """Whether the held-out prompts are evaluated after ``step`` > 0 steps."""
    evaluation = config.evaluation
    at_end = evaluation.at_end and step == config.training.steps
    return at_end or bool(evaluation.eval_interval and step % evaluation.eval_interval == 0)
