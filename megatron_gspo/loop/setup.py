"""From a checked config to the objects of a run on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from megatron_gspo.config import Config
from megatron_gspo.data.prompts import PromptError, PromptSource
from megatron_gspo.data.sample import Prompt
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.loop.engines import build_sources
from megatron_gspo.loop.inputs import check_prompts, check_weights, load_data, load_tokenizer, make_environments
from megatron_gspo.loop.reward_scoring import EpisodeRewards, Rewards, VerifierRewards
from megatron_gspo.loop.timers import UpdateClock
from megatron_gspo.mcore.model import ModelSettings
from megatron_gspo.mcore.policy import DataParallelSettings, OptimizerSettings, Policy, build_policy
from megatron_gspo.mcore.process_groups import Layout, initialize
from megatron_gspo.rewards.scorer import RewardScorer
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.group_source import GroupSource


@dataclass(frozen=True)
class Components:
    """The objects of a run on this rank, for `train`.

    reference: the frozen starting policy, if the objective has a KL. eval_groups: source of the held-out samples; None
    without held-out prompts. dropped_prompts: training prompts that were too long.
    """

    config: Config
    policy: Policy
    reference: Policy | None
    groups: GroupSource
    eval_groups: GroupSource | None
    rewards: Rewards
    prompts: PromptSource
    eval_prompts: list[Prompt]
    dropped_prompts: int
    tokenizer: Any

    def __enter__(self) -> Components:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def trains_on_rollouts(self) -> bool:
        """Whether training samples come from the policy, so that the engine needs its weights after every step."""
        return not self.config.algorithm.is_supervised

    def close(self) -> None:
        """End worker processes and engines."""
        self.rewards.close()
        self.groups.close()
        if self.eval_groups is not None and self.eval_groups is not self.groups:
            self.eval_groups.close()


def layout_of(config: Config) -> Layout:
    """The parallel sizes of a config."""
    parallel = config.parallel
    return Layout(
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=parallel.expert_tensor_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        embedding_as_layer=parallel.account_for_embedding_in_pipeline_split,
        loss_as_layer=parallel.account_for_loss_in_pipeline_split,
    )


def build_components(config: Config, *, engine: RolloutEngine | None = None) -> Components:
    """Check the inputs, start the process groups and build everything. ``engine`` replaces the configured one."""
    parallel, data = config.parallel, config.data
    shape = check_weights(config)
    disable_progress_bar()  # Transformers' own, one line for each rank
    tokenizer = load_tokenizer(config)
    try:
        train, held_out, dropped = load_data(config, tokenizer)
    except ImportError as error:  # an optional package; the message names it
        raise PromptError(str(error)) from None
    check_prompts(config, train, held_out, shape.vocab_size)
    environments = make_environments(config)
    rewards = build_rewards(config, environments)
    groups = initialize(
        layout_of(config),
        seed=config.seed,
        backend=parallel.backend,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )
    policy = build_policy(
        config.model.path,
        layout_of(config),
        groups,
        model=model_settings(config),
        data_parallel=DataParallelSettings(
            parallel.use_distributed_optimizer, parallel.overlap_grad_reduce, parallel.overlap_param_gather
        ),
        optimizer=_optimizer(config),
        pretrained=config.model.init == "pretrained",
    )
    policy.config.timers = UpdateClock() if config.tracking.detailed_timers else None
    reference = _reference(config, groups) if config.algorithm.needs_reference else None
    source, eval_source = build_sources(
        config, shape, tokenizer, environments, evaluates=bool(held_out), given=engine
    )
    return Components(
        config=config,
        policy=policy,
        reference=reference,
        groups=source,
        eval_groups=eval_source,
        rewards=rewards,
        prompts=PromptSource(train, seed=config.seed, shuffle=data.shuffle),
        eval_prompts=held_out,
        dropped_prompts=dropped,
        tokenizer=tokenizer,
    )


def build_rewards(config: Config, environments: EnvironmentPool | None) -> Rewards:
    """The environments' rewards if there are environments, otherwise the verifier's."""
    data = config.data
    if environments is not None:
        name = f"environment {config.rollout.environment!r}"
        return EpisodeRewards(environments, name, data.verifier_failure_reward)
    scorer = RewardScorer(
        data.resolved_verifier,
        data.verifier_options,
        timeout=data.verifier_timeout,
        workers=data.verifier_workers,
        failure_reward=data.verifier_failure_reward,
    )
    return VerifierRewards(scorer, f"verifier {data.resolved_verifier!r}")


def model_settings(config: Config) -> ModelSettings:
    """How the config asks for the model to be built."""
    model, parallel = config.model, config.parallel
    return ModelSettings(
        dtype=getattr(torch, model.dtype),
        implementation=model.implementation,
        recompute=model.recompute_granularity,
        recompute_num_layers=model.recompute_num_layers or 1,
        dispatcher=parallel.moe_token_dispatcher_type,
        sequence_parallel=parallel.sequence_parallel,
    )


def _optimizer(config: Config) -> OptimizerSettings:
    optimizer = config.optimizer
    return OptimizerSettings(
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        schedule=optimizer.lr_decay_style,
        warmup_steps=optimizer.lr_warmup_steps,
        total_steps=config.optimizer_steps,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
    )


def _reference(config: Config, groups: Any) -> Policy:
    return build_policy(
        config.model.path,
        layout_of(config),
        groups,
        model=model_settings(config),
        data_parallel=DataParallelSettings(),
        optimizer=None,
    )
