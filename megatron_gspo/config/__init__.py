"""Typed, strict configuration: one YAML file and `key.sub=value` overrides."""

from megatron_gspo.config.base import ConfigError
from megatron_gspo.config.cli import from_command_line, refuse
from megatron_gspo.config.schema import Config, load_config
from megatron_gspo.config.sections import (
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrackingConfig,
    TrainingConfig,
)
from megatron_gspo.config.task_sections import AlgorithmConfig, DataConfig, RolloutConfig, TaskConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RolloutConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainingConfig",
    "from_command_line",
    "load_config",
    "refuse",
]
