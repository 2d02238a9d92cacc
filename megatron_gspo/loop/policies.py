"""The models of a run in Megatron: the policy, its value model, and the frozen reference."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.config import Config
from megatron_gspo.mcore.megatron_options import MegatronOptions
from megatron_gspo.mcore.policy import Policy, TrainedParts, build_policy
from megatron_gspo.mcore.process_groups import ProcessGroups


def build_policies(
    config: Config, groups: ProcessGroups, options: MegatronOptions
) -> tuple[Policy, Policy | None]:
    """The policy, with its critic if the algorithm has one, and the reference, None without a KL.

    The reference is the frozen start: the policy without its adapters, or a second model.
    """
    policy = build_policy(
        config.model,
        config.parallel,
        groups,
        optimizer=config.optimizer,
        total_steps=config.optimizer_steps,
        parts=TrainedParts(lora=config.trained_lora, seed=config.seed),
        options=options,
    )
    if config.algorithm.needs_critic:
        policy.critic = _critic(config, groups, options)
    if not config.algorithm.needs_reference:
        return policy, None
    if policy.trained_lora is not None:
        return policy, policy.base()
    return policy, build_policy(
        config.model, config.parallel, groups, optimizer=None, options=options
    )


def _critic(config: Config, groups: ProcessGroups, options: MegatronOptions) -> Policy:
    model = replace(config.model, path=config.critic_path)
    if config.critic.path is not None:
        model = replace(model, megatron_path=None)  # that of the policy
    return build_policy(
        model,
        config.parallel,
        groups,
        optimizer=config.critic,
        total_steps=config.optimizer_steps,
        parts=TrainedParts(value_head=True),
        options=options,
    )
