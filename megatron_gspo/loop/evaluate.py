"""Held-out accuracy: mean@k and pass@k under the current weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.rollouts import rollout_seed
from megatron_gspo.loop.scoring import require_scores, sample_and_score
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.seeding import EVALUATION, seed_generators
from megatron_gspo.rollout.pass_at_k import mean_at_k, pass_at_k

# Apart from every training step's seed and the same at every evaluation, so that two evaluations differ by the weights.
_EVALUATION_STREAM = 2**31 - 1


def evaluate(run: Run, version: int, timers: Timers) -> dict[str, float]:
    """``eval/accuracy`` (mean@n), ``eval/pass@k`` and the response length on the held-out prompts."""
    assert run.eval_engine is not None
    config = run.config.evaluation
    seed_generators(run.config.seed, version, EVALUATION)
    if not run.generates_on_policy:
        with timers("weight_sync"):
            run.eval_engine.update_weights(run.policy.weights(), version=version)
    sampling = replace(
        run.config.rollout,
        n_samples_per_prompt=config.n_samples,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )
    quiet = Timers()
    with timers("evaluate"):
        samples, failures = sample_and_score(
            run,
            run.eval_engine,
            run.eval_prompts,
            sampling,
            rollout_seed(run.config.seed, _EVALUATION_STREAM),
            quiet,
        )
    require_scores(run, samples)
    # a response that could not be scored is not a solved one, and is counted
    rewards = np.nan_to_num([sample.reward for sample in samples], nan=0.0).reshape(-1, config.n_samples)
    found = {
        "eval/accuracy": mean_at_k(rewards),
        "eval/response_length": float(np.mean([sample.response_length for sample in samples])),
        "eval/verifier_failures": float(sum(failures.values())),
    }
    return found | {f"eval/pass@{k}": pass_at_k(rewards, k) for k in config.pass_at_k}
