"""Builds the objects of a run on this rank from a checked config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from megatron_gspo.config import Config, ConfigError, DataConfig, RoutingConfig, TeacherConfig
from megatron_gspo.data.prompt_mix import MixedPrompts, MixedPromptSource
from megatron_gspo.data.prompts import PromptSource
from megatron_gspo.data.sample import Prompt
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.loop.adapter_start import start_from_adapters
from megatron_gspo.loop.engines import build_sources, embedded_engine
from megatron_gspo.loop.inputs import (
    check_prompts,
    check_teacher_tokenizers,
    check_weights,
    load_data,
    load_tokenizer,
    make_environments,
    prompt_cache,
)
from megatron_gspo.loop.offloading_source import OffloadingSource
from megatron_gspo.loop.policies import build_policies
from megatron_gspo.loop.reward_scoring import EpisodeRewards, Rewards, VerifierRewards
from megatron_gspo.loop.teacher_choice import teacher_numbers
from megatron_gspo.loop.teachers import ServerTeacher, Teacher, Teachers, TrainerTeacher
from megatron_gspo.loop.timers import UpdateClock
from megatron_gspo.mcore.policy import Policy, build_policy, check_megatron_options
from megatron_gspo.mcore.process_groups import initialize
from megatron_gspo.models import family_of, read_config
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.rewards.sandbox.visible_files import refuse_visible_run
from megatron_gspo.rewards.source_scorers import source_scorers
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.group_source import GroupSource, Weights
from megatron_gspo.rollout.server_engine.scoring_client import ScoringClient
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.routing_replay.perturbation import Perturbation, load_perturbation
from megatron_gspo.tracking.trackers import enabled_trackers, require_packages
from megatron_gspo.weight_transport.weight_source import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Components:
    """The objects of a run on this rank, for `train`."""

    config: Config
    policy: Policy
    reference: Policy | None
    """The frozen starting policy, if the objective has a KL."""

    engine: RolloutEngine | None
    """The engine in this rank, if there is one that samples from the policy."""

    groups: GroupSource
    eval_groups: GroupSource | None
    """Source of the held-out samples; None without held-out prompts."""

    rewards: Rewards
    eval_rewards: Rewards
    """Those of held-out responses; ``rewards`` itself without ``evaluation.verifier``."""

    prompts: PromptSource
    eval_prompts: Sequence[Prompt]
    dropped_prompts: int
    """Training prompts that were too long."""

    tokenizer: PreTrainedTokenizerBase
    perturbation: Perturbation | None = None
    """Perturbation of the routers' choice, in the trainer and in ``engine``."""

    teachers: Teachers | None = None
    """What is distilled into the policy."""

    def __enter__(self) -> Components:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def trains_on_rollouts(self) -> bool:
        """Whether training samples come from the policy, so that the engine needs its weights
        after every step.
        """
        config = self.config
        return not config.algorithm.is_supervised and config.training.only != "train"

    @cached_property
    def weights(self) -> Weights:
        """The stream of what the engine gets of the policy: its adapters, or its weights, quantised
        tensor by tensor if they are."""
        if self.config.lora.sends_adapters:
            return self.policy.adapters
        plan = self.config.quantization_plan
        if plan is None:
            return self.policy.weights

        def quantized(source: WeightSource | None = None, /) -> Iterator[tuple[str, Tensor]]:
            return plan.quantize(self.policy.weights(source))

        return quantized

    def close(self) -> None:
        """End worker processes and engines."""
        self.rewards.close()
        if self.eval_rewards is not self.rewards:
            self.eval_rewards.close()
        self.groups.close()
        if self.teachers is not None:
            self.teachers.close()
        if self.eval_groups is not None and self.eval_groups is not self.groups:
            self.eval_groups.close()


def build_components(config: Config, *, engine: RolloutEngine | None = None) -> Components:
    """Check the inputs, start the process groups and build everything.

    ``engine`` replaces the configured one.
    """
    perturbation = load_perturbation(config.routing)
    parallel = config.parallel
    shape = check_weights(config)
    options = check_megatron_options(
        config.megatron, shape, parallel, config.model, config.optimizer, config.routing
    )
    disable_progress_bar()  # Transformers' own, one line for each rank
    tokenizer = load_tokenizer(config)
    check_teacher_tokenizers(config.distillation, tokenizer)
    train, held_out, dropped = load_data(config, tokenizer, prompt_cache(config))
    generates = config.training.only != "train"
    if not generates:
        held_out = []
    check_prompts(config, train, held_out, shape.vocab_size)
    chosen = teacher_numbers(config.distillation, train)
    environments = make_environments(config)
    rewards = build_rewards(config, environments)
    eval_rewards = rewards
    if held_out and config.evaluation.verifier is not None:
        eval_rewards = verifier_rewards(config.evaluation_data)
    groups = initialize(parallel, seed=config.seed)
    run_on_rank_zero(lambda: require_packages(**enabled_trackers(config.tracking)))
    policy, reference = build_policies(config, groups, options)
    if policy.trained_lora is not None and policy.trained_lora.adapter_path is not None:
        start_from_adapters(policy, policy.trained_lora)
    policy.config.timers = UpdateClock() if config.tracking.detailed_timers else None
    teachers = _teachers(config, policy, chosen) if config.distillation.is_on else None
    if engine is None and generates and config.rollout.engine == "embedded":
        engine = embedded_engine(config, shape, tokenizer)
    source, eval_source = build_sources(
        config, shape, tokenizer, environments, evaluates=bool(held_out), given=engine
    )
    if config.offloads_trainer:
        evaluates_by_same_source = eval_source is source
        # With adapters the reference is the policy's own base.
        separate_reference = None if policy.trained_lora is not None else reference
        source = OffloadingSource(source, policy, separate_reference)
        eval_source = source if evaluates_by_same_source else eval_source
    return Components(
        config=config,
        policy=policy,
        reference=reference,
        engine=engine,
        groups=source,
        eval_groups=eval_source,
        rewards=rewards,
        eval_rewards=eval_rewards,
        prompts=prompt_source(config, train),
        eval_prompts=held_out,
        dropped_prompts=dropped,
        tokenizer=tokenizer,
        perturbation=perturbation,
        teachers=teachers,
    )


def prompt_source(config: Config, prompts: Sequence[Prompt]) -> PromptSource:
    """The prompts in the order of training. Raises PromptError if a source has too few of them."""
    data = config.data
    if not isinstance(prompts, MixedPrompts):
        return PromptSource(prompts, seed=config.seed, shuffle=data.shuffle)
    weights = {source.name: source.weight for source in data.sources}
    mixed = MixedPromptSource(prompts, weights, seed=config.seed, shuffle=data.shuffle)
    mixed.check_sizes(config.rollout.rollout_batch_size)
    return mixed


def build_rewards(config: Config, environments: EnvironmentPool | None) -> Rewards:
    """The agents' or the environments' rewards if there are any, otherwise the verifier's."""
    data = config.data
    if config.samples_are_runs:
        return EpisodeRewards(environments, config.player, data.verifier_failure_reward)
    refuse_visible_run(config)
    return verifier_rewards(data)


def verifier_rewards(data: DataConfig) -> VerifierRewards:
    """The rewards of the sources' verifiers."""
    names = ", ".join(repr(name) for name in data.verifiers)
    return VerifierRewards(source_scorers(data), f"verifier {names}")


def _teachers(config: Config, policy: Policy, chosen: np.ndarray | None) -> Teachers:
    """chosen: `teacher_numbers` of the training prompts."""
    teachers = {
        name: build_teacher(config, teacher, policy)
        for name, teacher in config.distillation.by_name.items()
    }
    return Teachers(teachers, chosen)


def check_teacher_length(client: ScoringClient, teacher: TeacherConfig, config: Config) -> None:
    """Raises ConfigError for a server that can't score the longest sample."""
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if problem := client.too_short(longest):
        launch = SERVER_KINDS[teacher.engine].launch
        raise ConfigError(
            f"{teacher.prefix}.urls",
            list(teacher.urls),
            f"{problem}, a prompt and its response may have {longest}",
            f"start it with a larger {launch.length_options}, or lower rollout.max_response_length",
        )


def build_teacher(config: Config, teacher: TeacherConfig, policy: Policy) -> Teacher:
    """A teacher of section `distillation`: servers if it has URLs, else a model in the policy's
    layout."""
    shape = family_of(read_config(teacher.teacher))[1]
    if teacher.urls:
        api = SERVER_KINDS[teacher.engine].api
        # An id that the policy does not have is refused.
        served = replace(shape, vocab_size=policy.shape.vocab_size)
        model = ServedModel(served, top_log_probs=config.distillation.num_ids)
        client = ScoringClient(teacher.servers, api, model)
        run_on_rank_zero(lambda: check_teacher_length(client, teacher, config))
        return ServerTeacher(client, policy.groups)
    frozen_model = replace(config.model, path=teacher.teacher, init="pretrained")
    options = check_megatron_options(
        config.megatron,
        shape,
        config.parallel,
        frozen_model,
        config.optimizer,
        RoutingConfig(metrics=False),  # the teacher's routers choose for themselves
    )
    frozen = build_policy(
        frozen_model, config.parallel, policy.groups, optimizer=None, options=options
    )
    return TrainerTeacher(frozen, config, policy)
