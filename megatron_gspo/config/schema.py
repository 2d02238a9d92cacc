"""`Config`: all sections, how they are loaded, and the checks that the run can start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import yaml
from annotated_types import Ge

from megatron_gspo.config.agents_checks import (
    check_agent_files,
    check_agents,
    check_run_sizes,
)
from megatron_gspo.config.agents_section import AgentsConfig
from megatron_gspo.config.algorithm_checks import (
    check_algorithm,
    check_rollout_correction,
    check_routing,
    check_score_centering,
    check_top_ids,
    refuse_products_of_ratios,
)
from megatron_gspo.config.algorithm_section import AlgorithmConfig, with_preset
from megatron_gspo.config.data_checks import (
    check_data,
    check_data_files,
    check_evaluation_verifier,
    check_evaluation_verifier_file,
)
from megatron_gspo.config.data_sections import DataConfig
from megatron_gspo.config.distillation_checks import (
    check_distillation,
    check_teacher_model,
    check_top_k,
)
from megatron_gspo.config.distillation_section import DistillationConfig
from megatron_gspo.config.key_files import check_key_file
from megatron_gspo.config.load import apply_overrides, read_file
from megatron_gspo.config.lora_checks import (
    check_adapter_files,
    check_adapter_updates,
    check_lora,
    check_targets,
)
from megatron_gspo.config.lora_section import LoRAConfig
from megatron_gspo.config.model_checks import (
    check_context,
    check_critic_model,
    check_experts,
    check_family,
    check_megatron_path,
    check_positions,
    check_weight_files,
    read_hf_config,
)
from megatron_gspo.config.model_sections import ModelConfig, ParallelConfig
from megatron_gspo.config.parallel_checks import check_divisibility, check_layout, check_parallel
from megatron_gspo.config.paths import UserPath, expand_paths
from megatron_gspo.config.quantization_checks import check_quantization, resolve_quantization
from megatron_gspo.config.rollout_checks import (
    check_environment,
    check_environment_file,
    check_offloading,
    check_sampling,
    check_support,
)
from megatron_gspo.config.rollout_sections import RolloutConfig, RoutingConfig
from megatron_gspo.config.server_checks import check_server_files, check_servers
from megatron_gspo.config.server_sections import ServerConfig, SGLangConfig, VLLMConfig
from megatron_gspo.config.training_checks import (
    check_batches,
    check_critic,
    check_evaluation,
    check_global_batch,
    check_halves,
    check_optimizer,
    check_profile,
    check_recompute,
    check_run_dir,
)
from megatron_gspo.config.training_sections import (
    CheckpointConfig,
    CriticConfig,
    EvaluationConfig,
    GuardConfig,
    OptimizerConfig,
    ProfileConfig,
    TrackingConfig,
    TrainingConfig,
)
from megatron_gspo.config.validate import STRICT, validate

if TYPE_CHECKING:
    from megatron_gspo.models.quantization.plan import QuantizationPlan


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. Build it with load_config or Config.from_dict; both raise ConfigError."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    seed: Annotated[int, Ge(0)] = 1234
    """Seed of weights, prompt order and sampling."""
    run_dir: UserPath
    """Directory of all output."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options of Megatron-Core (docs/scaling.md)."""
    callbacks: tuple[UserPath, ...] = ()
    """Import paths of callbacks (docs/extending.md)."""
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig.preset)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    data: DataConfig
    rollout: RolloutConfig
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    training: TrainingConfig
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        """Validate plain data: keys, types, bounds and choices that contradict each other.

        Raises ConfigError for the first fault. `check` does what depends on the number of processes
        or on files.
        """
        refuse_products_of_ratios(data.get("algorithm"))
        config = expand_paths(validate(cls, _resolve_preset(data)))
        config._check_choices()
        return config

    def check(self, world_size: int) -> None:
        """Check that the run can start on world_size processes: layout, batches, model and files.

        Raises ConfigError.
        """
        self.check_sizes(world_size)
        # These import torch, which reading a config does without.
        from megatron_gspo.algorithms.advantage_estimators import check_advantages
        from megatron_gspo.algorithms.surrogate import check_surrogate

        check_surrogate(self.algorithm)
        check_advantages(self.algorithm)
        check_run_dir(self.run_dir, self.checkpoint.resume)
        check_server_files(self.servers)
        check_environment_file(self.rollout)
        check_agent_files(self.agents)
        check_data_files(self.data)
        if self.evaluation.verifier is not None:
            check_evaluation_verifier_file(self.evaluation_data)
        check_adapter_files(self.lora)
        check_megatron_path(self.model)
        is_pretrained = self.model.init == "pretrained"
        are_served = is_pretrained and bool(self.servers.num_servers)
        are_read = self.model.reads_files or are_served
        check_weight_files("model.path", self.model.path, are_read=are_read)
        if self.critic.path is not None:
            check_weight_files("critic.path", self.critic.path, are_read=is_pretrained)
        for teacher in self.distillation.by_name.values():
            are_read = not teacher.urls
            check_weight_files(f"{teacher.prefix}.teacher", teacher.teacher, are_read=are_read)
            if teacher.api_key_file is not None:
                check_key_file(f"{teacher.prefix}.api_key_file", teacher.api_key_file)

    def check_sizes(self, world_size: int) -> None:
        """The part of `check` that needs no file of the run but the model's config.json.

        Raises ConfigError.
        """
        check_layout(self.parallel, world_size)
        check_profile(self.profile, self.training.steps, world_size)
        check_batches(self.training, self.parallel, self._max_call_tokens, world_size)
        if self.agents.is_on:
            check_run_sizes(self.agents, self.max_context, self.max_run_tokens, self._room_for_runs)
        hf = read_hf_config(self.model.path)
        check_family("model.path", self.model.path, hf)
        check_divisibility(self.parallel, hf)
        check_experts(self.routing, hf)
        check_positions(self.rollout, self.data.max_prompt_length, hf)
        if self.agents.max_context is not None:
            check_context("agents.max_context", self.agents.max_context, hf)
        check_targets(self.lora, hf)
        check_top_ids(self.algorithm, hf)
        resolve_quantization(self.rollout.quantization, hf)
        if self.critic.path is not None:
            critic = read_hf_config(self.critic.path, "critic.path")
            check_family("critic.path", self.critic.path, critic)
            check_divisibility(self.parallel, critic)
            check_critic_model(self.critic.path, critic, hf)
        for teacher in self.distillation.by_name.values():
            key = f"{teacher.prefix}.teacher"
            of_teacher = read_hf_config(teacher.teacher, key)
            check_family(key, teacher.teacher, of_teacher)
            if not teacher.urls:
                check_divisibility(self.parallel, of_teacher)
            check_teacher_model(teacher, of_teacher, hf)
        check_top_k(self.distillation, hf)

    def _check_choices(self) -> None:
        """Refuse choices that contradict each other on any machine. Raises ConfigError."""
        check_algorithm(
            self.algorithm, self.rollout, self.model, needs_groups=self.distillation.needs_groups
        )
        check_distillation(
            self.distillation, self.algorithm, self.rollout, self.data, self.training
        )
        check_sampling(self.rollout, self.evaluation)
        check_support(
            self.rollout,
            self.algorithm,
            has_teacher=self.distillation.is_on,
            samples_are_runs=self.samples_are_runs,
        )
        check_rollout_correction(self.algorithm)
        check_score_centering(self.algorithm, samples_are_runs=self.samples_are_runs)
        check_environment(self.rollout, self.algorithm, self.data, has_turns=self.agents.is_on)
        check_agents(self.agents, self.rollout, self.algorithm, self.data)
        check_quantization(self.rollout)
        check_data(self.data, scored_by_agents=self.samples_are_runs)
        check_parallel(self.parallel)
        check_global_batch(self.training, self.rollout.sequences)
        check_halves(self.training, self.algorithm)
        check_recompute(self.model)
        check_lora(self.lora, self.model)
        check_optimizer("optimizer", self.optimizer, self.optimizer_steps)
        check_critic(self.critic, self.algorithm, self.training.steps)
        check_optimizer("critic", self.critic, self.optimizer_steps)
        check_routing(self.routing, self.algorithm)
        check_evaluation(
            self.evaluation,
            has_eval_prompts=self.data.has_eval_prompts,
            samples_are_runs=self.samples_are_runs,
        )
        if self.evaluation.verifier is not None:
            check_evaluation_verifier(self.evaluation_data)
        check_servers(self.rollout, self._server_sections)
        check_adapter_updates(self.lora, self.rollout, self.servers)
        check_offloading(self.rollout, self.servers)

    def dump(self) -> dict[str, Any]:
        """Plain data with every default written out; from_dict(dump()) is the same config."""
        return _plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """`dump` as YAML text."""
        return yaml.safe_dump(self.dump(), sort_keys=False, allow_unicode=True)

    @property
    def _max_call_tokens(self) -> int:
        """Tokens of the longest prompt of the data and its response."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    @property
    def samples_are_runs(self) -> bool:
        """Whether a sample is a run of an agent, or an episode with an environment."""
        return self.agents.is_on or self.rollout.environment is not None

    @property
    def player(self) -> str:
        """Who plays the runs that samples are, for messages."""
        return "the agent" if self.agents.is_on else f"environment {self.rollout.environment!r}"

    @property
    def evaluation_data(self) -> DataConfig:
        """`data` with the verifier of held-out responses."""
        evaluation = self.evaluation
        if evaluation.verifier is None:
            return self.data
        return self.data.with_verifier(
            evaluation.verifier, evaluation.verifier_options, evaluation.verifier_timeout
        )

    @property
    def max_context(self) -> int:
        """`agents.max_context`, null resolved."""
        return self.agents.max_context or self._max_call_tokens

    @property
    def max_run_tokens(self) -> int:
        """`agents.max_run_tokens`, null resolved."""
        return self.agents.max_run_tokens or self._room_for_runs

    @property
    def _room_for_runs(self) -> int:
        """Tokens of the rows of a run, at most one a call, that a micro-batch holds with their
        padding."""
        tokens = self.training.max_tokens_per_micro_batch
        budget = tokens - tokens % self.parallel.total_multiple
        calls = self.agents.max_calls if self.agents.is_on else self.rollout.max_turns
        return budget - (calls - 1) * (self.parallel.sequence_multiple - 1)

    @property
    def offloads_trainer(self) -> bool:
        """`rollout.offload_trainer`, null resolved."""
        offload = self.rollout.offload_trainer
        return self.servers.colocated if offload is None else offload

    @property
    def servers(self) -> ServerConfig:
        """The section of `rollout.engine`'s servers; defaults for an engine without servers."""
        return self._server_sections.get(self.rollout.engine, ServerConfig())

    @property
    def _server_sections(self) -> dict[str, ServerConfig]:
        return {section.section: section for section in (self.sglang, self.vllm)}

    @property
    def trained_lora(self) -> LoRAConfig | None:
        """The `lora` section, if adapters are trained."""
        return self.lora if self.lora.is_on else None

    @cached_property
    def quantization_plan(self) -> QuantizationPlan | None:
        """What `rollout.quantization` makes of the model's weights; None: they stay as they
        are. Raises ConfigError.
        """
        section = self.rollout.quantization
        if not section.is_on:
            return None
        return resolve_quantization(section, read_hf_config(self.model.path))

    @property
    def critic_path(self) -> str:
        """`critic.path`, null resolved."""
        return self.critic.path or self.model.path

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, which is the length of the learning-rate schedule."""
        per_epoch = self.rollout.sequences // self.training.global_batch_size
        return self.training.steps * self.training.ppo_epochs * per_epoch


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    server_args: Mapping[str, Sequence[str]] | None = None,
) -> Config:
    """Load a YAML file, apply `key.sub=value` overrides and validate. Raises ConfigError.

    server_args: by section, appended to its `server_args`; later arguments take precedence.
    """
    data = read_file(path)
    data.pop("environment", None)  # where a finished run was, in its own config.yaml
    data = apply_overrides(data, overrides)
    for name, arguments in (server_args or {}).items():
        section = data.setdefault(name, {})
        if isinstance(section, dict) and isinstance(section.setdefault("server_args", []), list):
            section["server_args"] = [*section["server_args"], *arguments]
    return Config.from_dict(data)


def _resolve_preset(data: dict[str, Any]) -> dict[str, Any]:
    """The data with the fields of the algorithm's preset filled in."""
    algorithm = data.get("algorithm", {})
    rollout = data.get("rollout")
    if not isinstance(algorithm, dict):
        return data
    longest = rollout.get("max_response_length") if isinstance(rollout, dict) else None
    longest = RolloutConfig.max_response_length if longest is None else longest
    return {**data, "algorithm": with_preset(algorithm, max_response_length=longest)}


def _plain(value: Any) -> Any:
    """Tuples as lists, in all mappings and sequences."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
