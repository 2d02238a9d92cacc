"""Loads and checks a run's inputs: model files, tokenizer, prompts, environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.data.prompts import PromptError, load_prompts
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.tasks import load_task
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.errors import first_line
from megatron_gspo.models import ModelError, ModelShape, check_names, family_of, read_config
from megatron_gspo.models.hf_checkpoint import CheckpointReader

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def make_environments(config: Config) -> EnvironmentPool | None:
    """This rank's environments, under the limits of verifiers; None where the config has none."""
    rollout, data = config.rollout, config.data
    if rollout.environment is None:
        return None
    return EnvironmentPool(rollout.environment, rollout.environment_options, timeout=data.verifier_timeout,
                           workers=data.verifier_workers)


def check_weights(config: Config) -> ModelShape:
    """The model's sizes. Raises ``ConfigError`` unless the checkpoint is complete and has exactly the tensors that its
    config.json requires."""
    try:
        family, shape = family_of(read_config(config.model.path))
        if config.model.init == "pretrained":
            with CheckpointReader(config.model.path) as weights:
                check_names(weights.names, family, shape)
                weights.check()
    except ModelError as error:
        fix = "give a complete safetensors checkpoint of a supported model"
        raise ConfigError("model.path", config.model.path, f"cannot be trained: {error}", fix) from None
    return shape


def load_tokenizer(config: Config) -> Any:
    """The model's tokenizer; ``ConfigError`` if it can't be loaded."""
    path = config.model.path
    if not any((Path(path) / name).is_file() for name in _TOKENIZERS):  # Transformers would make an empty one
        problem = f"has no tokenizer (none of {', '.join(_TOKENIZERS)})"
        raise ConfigError("model.path", path, problem, "copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # Transformers raises various types, also for damaged files
        problem, fix = f"its tokenizer can't be loaded: {first_line(error)}", "copy the model's tokenizer files there"
        raise ConfigError("model.path", path, problem, fix) from None
    if config.rollout.engine == "sft" and tokenizer.eos_token_id is None:
        problem = "its tokenizer has no end token, which ends every demonstration"
        raise ConfigError("model.path", path, problem, "set eos_token in tokenizer_config.json")
    return tokenizer


def check_prompts(config: Config, train: list[Prompt], held_out: list[Prompt], vocab_size: int) -> None:
    """Enough prompts for a batch, of token ids that the model has; else ``PromptError``."""
    size = config.rollout.rollout_batch_size
    if len(train) < size:
        raise PromptError(
            f"there are {len(train)} training prompts and rollout.rollout_batch_size is {size}; lower it or add prompts"
        )
    for prompt in (*train, *held_out):
        if (largest := int(prompt.token_ids.max())) >= vocab_size:
            raise PromptError(
                f"prompt {prompt.index} has the token id {largest}, the model's vocabulary ends at {vocab_size - 1}; "
                "tokenizer and config.json in model.path are of different models"
            )


def load_data(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt], int]:
    """(training prompts, held-out prompts, prompts dropped for their length)."""
    data = config.data
    if data.task is not None:
        task = load_task(data.task, tokenizer, data)
        sets = [task.train] + ([task.evaluation] if task.evaluation else [])
    else:
        sets = [load_prompts(data.prompts or "", tokenizer, data)]
    if data.eval_prompts:
        sets = [sets[0], load_prompts(data.eval_prompts, tokenizer, data)]
    held_out = sets[1].prompts[: config.evaluation.max_prompts] if len(sets) > 1 else []
    return sets[0].prompts, held_out, sum(prompts.dropped for prompts in sets)
