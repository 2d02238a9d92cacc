"""Typed, strict configuration: one YAML file and `key.sub=value` overrides."""

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.cli import from_command_line, refuse
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.data_sections import DataConfig, SourceConfig, TaskConfig
from megatron_gspo.config.distillation_section import DistillationConfig, TeacherConfig
from megatron_gspo.config.lora_section import LoRAConfig
from megatron_gspo.config.model_sections import ModelConfig, ParallelConfig
from megatron_gspo.config.rollout_sections import RolloutConfig, RoutingConfig, SamplingParams
from megatron_gspo.config.schema import Config, load_config
from megatron_gspo.config.server_sections import ServerConfig, SGLangConfig, VLLMConfig
from megatron_gspo.config.training_sections import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    ProfileConfig,
    TrackingConfig,
    TrainingConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistillationConfig",
    "EvaluationConfig",
    "LoRAConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RolloutConfig",
    "RoutingConfig",
    "SGLangConfig",
    "SamplingParams",
    "ServerConfig",
    "SourceConfig",
    "TaskConfig",
    "TeacherConfig",
    "TrackingConfig",
    "TrainingConfig",
    "VLLMConfig",
    "from_command_line",
    "load_config",
    "refuse",
]
