"""Checks of batches, optimizer, evaluation and the run directory. Each raises ConfigError."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.fields import default_of
from megatron_gspo.config.model_sections import ModelConfig, ParallelConfig
from megatron_gspo.config.training_sections import (
    CriticConfig,
    EvaluationConfig,
    OptimizerConfig,
    ProfileConfig,
    TrainingConfig,
)
from megatron_gspo.errors import existing_part
from megatron_gspo.given_names import CHECKPOINTS


def check_recompute(model: ModelConfig) -> None:
    """recompute_num_layers has an effect."""
    if model.recompute_num_layers is not None and model.recompute_granularity != "full":
        value = model.recompute_num_layers
        problem = "needs recompute_granularity: full"
        fix = "set model.recompute_granularity: full, or this to null"
        raise ConfigError("model.recompute_num_layers", value, problem, fix)


def check_halves(training: TrainingConfig, algorithm: AlgorithmConfig) -> None:
    """Half of the loop has batches to write or to read."""
    if training.only is not None and training.batches is None:
        problem = "needs a directory of rollout batches"
        raise ConfigError("training.only", training.only, problem, "set training.batches")
    if training.batches is not None and algorithm.is_supervised:
        problem = "sft has no rollout batches"
        raise ConfigError("training.batches", training.batches, problem, "remove the key")


def check_profile(profile: ProfileConfig, steps: int, world_size: int) -> None:
    """The run has the steps and the ranks."""
    if profile.steps and max(profile.steps) > steps:
        problem = f"the run ends after training.steps = {steps}"
        raise ConfigError("profile.steps", list(profile.steps), problem, "name earlier steps")
    if max(profile.ranks, default=0) >= world_size:
        problem = f"there are ranks 0 to {world_size - 1}"
        raise ConfigError("profile.ranks", list(profile.ranks), problem, "name one of these")


def check_global_batch(training: TrainingConfig, sequences: int) -> None:
    """Mini-batches divide the rollout batch. sequences: responses of a rollout batch."""
    batch = training.global_batch_size
    if sequences % batch:
        problem = (
            f"does not divide the {sequences} sequences of a rollout batch (prompts x samples per"
            " prompt)"
        )
        fix = f"set a divisor of {sequences}, or change rollout.rollout_batch_size"
        raise ConfigError("training.global_batch_size", batch, problem, fix)


def check_optimizer(section: str, optimizer: OptimizerConfig, steps: int) -> None:
    """The optimizer's options have an effect, and its learning-rate schedule fits the run.

    steps: optimizer steps of the whole run.
    """
    if optimizer.options and optimizer.function is None:
        problem = f"has no effect with {section}.function = null"
        raise ConfigError(
            f"{section}.options", optimizer.options, problem, "set that, or remove the key"
        )
    if optimizer.lr_decay_style == "constant" and optimizer.min_lr:
        problem = "a constant schedule never reaches it"
        fix = f"set {section}.lr_decay_style: linear or cosine"
        raise ConfigError(f"{section}.min_lr", optimizer.min_lr, problem, fix)
    if optimizer.min_lr > optimizer.lr:
        problem = f"is above {section}.lr = {optimizer.lr}"
        raise ConfigError(f"{section}.min_lr", optimizer.min_lr, problem, "lower it")
    if optimizer.lr_warmup_steps > steps:
        problem = f"is longer than the run's {steps} optimizer steps"
        fix = "lower it or raise training.steps"
        raise ConfigError(f"{section}.lr_warmup_steps", optimizer.lr_warmup_steps, problem, fix)


def check_critic(critic: CriticConfig, algorithm: AlgorithmConfig, steps: int) -> None:
    """The keys of the value model have an effect. steps: of the run."""
    if not algorithm.needs_critic:
        for item in fields(CriticConfig):
            if (value := getattr(critic, item.name)) != default_of(CriticConfig, item.name):
                problem = (
                    "has no effect with algorithm.advantage_estimator ="
                    f" {algorithm.advantage_estimator}"
                )
                raise ConfigError(
                    f"critic.{item.name}",
                    value,
                    problem,
                    "set algorithm.name: ppo, or remove the key",
                )
    elif critic.warmup_steps >= steps:
        problem = f"leaves none of the run's {steps} steps for the policy"
        fix = "lower it or raise training.steps"
        raise ConfigError("critic.warmup_steps", critic.warmup_steps, problem, fix)


def check_evaluation(
    evaluation: EvaluationConfig, *, has_eval_prompts: bool, samples_are_runs: bool
) -> None:
    """There are held-out prompts where evaluation is configured, nothing else scores their
    responses, and pass@k has enough of them.
    """
    samples = evaluation.n_samples
    for key in ("eval_interval", "verifier"):
        value = getattr(evaluation, key)
        if value and not has_eval_prompts:
            problem = "there are no held-out prompts"
            fix = "set data.eval_prompts or data.task.eval_size"
            raise ConfigError(f"evaluation.{key}", value, problem, fix)
    if evaluation.verifier is not None and samples_are_runs:
        problem = "has no effect with agents or an environment, which give the rewards"
        raise ConfigError("evaluation.verifier", evaluation.verifier, problem, "remove it")
    if evaluation.verifier is None and evaluation.verifier_options:
        problem = "has no effect without evaluation.verifier"
        fix = "set evaluation.verifier, or remove it"
        raise ConfigError("evaluation.verifier_options", evaluation.verifier_options, problem, fix)
    if evaluation.temperature == 0 and samples > 1:
        problem = "greedy responses to one prompt are all equal"
        fix = "set 1, or a temperature above 0"
        raise ConfigError("evaluation.n_samples", samples, problem, fix)
    if evaluation.pass_at_k and max(evaluation.pass_at_k) > samples:
        problem = f"pass@k needs k <= evaluation.n_samples = {samples}"
        fix = "raise n_samples or drop the larger k"
        raise ConfigError("evaluation.pass_at_k", evaluation.pass_at_k, problem, fix)


def check_batches(
    training: TrainingConfig, parallel: ParallelConfig, longest: int, world_size: int
) -> None:
    """The longest sequence fits the token budget; fixed micro-batches fill every rank.

    longest: tokens of the longest prompt and response together.
    """
    ranks = parallel.data_parallel_size(world_size)
    batch = training.global_batch_size
    count = training.micro_batch_size
    if count is not None and batch % (count * ranks):
        problem = f"micro_batch_size {count} x {ranks} data-parallel ranks does not divide it"
        fix = f"set a multiple of {count * ranks}, or training.micro_batch_size: null"
        raise ConfigError("training.global_batch_size", batch, problem, fix)
    if batch < ranks:
        problem = f"leaves some of the {ranks} data-parallel ranks without a sequence"
        raise ConfigError("training.global_batch_size", batch, problem, f"set at least {ranks}")
    multiple = parallel.total_multiple
    padded = -(-longest // multiple) * multiple
    if count is None and training.max_tokens_per_micro_batch < padded:
        problem = (
            f"a sequence may take {padded} tokens (data.max_prompt_length +"
            f" rollout.max_response_length, padded to a multiple of {multiple})"
        )
        value = training.max_tokens_per_micro_batch
        raise ConfigError(
            "training.max_tokens_per_micro_batch", value, problem, f"set at least {padded}"
        )


def check_run_dir(run_dir: str, resume: str) -> None:
    """The run directory can be written, and holds no other run where `resume` is "never"."""
    folder = Path(run_dir)
    existing = existing_part(folder)
    if not existing.is_dir():
        raise ConfigError("run_dir", run_dir, f"{existing} is a file", "choose another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} can't be written by this user"
        raise ConfigError(
            "run_dir", run_dir, problem, "make it writable or choose another directory"
        )
    is_used = (folder / "metrics.jsonl").exists() or CHECKPOINTS.entries(folder / "checkpoints")
    if resume == "never" and is_used:
        fix = "choose another run_dir or set checkpoint.resume: auto"
        raise ConfigError("run_dir", run_dir, "holds another run", fix)
