"""Loads and checks a run's inputs: model files, tokenizer, prompts, environments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import AutoTokenizer

from megatron_gspo.config import Config, ConfigError, DataConfig, DistillationConfig
from megatron_gspo.config.config_error import show
from megatron_gspo.data.prompt_cache import MappedPrompts, PromptCache, digests_of
from megatron_gspo.data.prompt_files import HELD_OUT
from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.prompts import PromptError, PromptSet, load_prompts
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.tasks import load_task
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.errors import first_line
from megatron_gspo.models import ModelError, ModelShape, family_of, read_config
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.families import with_value_head
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.terminal import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def make_environments(config: Config) -> EnvironmentPool | None:
    """This rank's environments, under the limits of verifiers; None where the config has none."""
    rollout = config.rollout
    data = config.data
    if rollout.environment is None:
        return None
    return EnvironmentPool(
        rollout.environment,
        rollout.environment_options,
        timeout=data.verifier_timeout,
        workers=data.verifier_workers,
    )


def check_weights(config: Config) -> ModelShape:
    """The model's sizes. Raises ``ConfigError`` unless the checkpoints of the policy, its critic and
    its teachers are complete and have exactly the tensors that their config.json requires."""
    model = config.model
    for teacher in config.distillation.by_name.values():
        key = f"{teacher.prefix}.teacher"
        _check_checkpoint(key, teacher.teacher, are_read=not teacher.urls)
    if config.critic.path is not None:
        are_read = model.init == "pretrained"
        _check_checkpoint("critic.path", config.critic.path, are_read=are_read, value_head=True)
    return _check_checkpoint("model.path", model.path, are_read=model.reads_files)


def _check_checkpoint(
    key: str, path: str, *, are_read: bool, value_head: bool = False
) -> ModelShape:
    """are_read: whether the weights in the directory are."""
    try:
        family, shape = family_of(read_config(path))
        if are_read:
            with CheckpointReader(path) as weights:
                check_checkpoint(weights, family, with_value_head(shape) if value_head else shape)
    except ModelError as error:
        fix = "give a complete safetensors checkpoint of a supported model"
        raise ConfigError(key, path, f"cannot be trained: {error}", fix) from None
    return shape


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The model's tokenizer; ``ConfigError`` if it can't be loaded."""
    path = config.model.path
    tokenizer = _load_tokenizer("model.path", path)
    if config.rollout.engine == "sft" and tokenizer.eos_token_id is None:
        problem = "its tokenizer has no end token, which ends every demonstration"
        raise ConfigError("model.path", path, problem, "set eos_token in tokenizer_config.json")
    return tokenizer


def check_teacher_tokenizers(
    distillation: DistillationConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The teachers' tokens have the policy's ids; else ``ConfigError``. tokenizer: the policy's."""
    vocabulary = tokenizer.get_vocab() if distillation.is_on else {}
    for teacher in distillation.by_name.values():
        _check_vocabulary(f"{teacher.prefix}.teacher", teacher.teacher, vocabulary)


def _check_vocabulary(key: str, path: str, vocabulary: Mapping[str, int]) -> None:
    of_teacher = _load_tokenizer(key, path).get_vocab()
    if of_teacher == vocabulary:
        return
    every = sorted(vocabulary.keys() | of_teacher.keys())
    token = next(token for token in every if vocabulary.get(token) != of_teacher.get(token))
    problem = (
        f"has another tokenizer: token {show(token)} is id {show(of_teacher.get(token))} there and"
        f" {show(vocabulary.get(token))} in model.path"
    )
    raise ConfigError(key, path, problem, "use a teacher with the policy's tokenizer")


def _load_tokenizer(key: str, path: str) -> PreTrainedTokenizerBase:
    # Transformers would make an empty one.
    if not any((Path(path) / name).is_file() for name in _TOKENIZERS):
        problem = f"has no tokenizer (none of {', '.join(_TOKENIZERS)})"
        raise ConfigError(key, path, problem, "copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # Transformers raises various types, also for damaged files
        problem = f"its tokenizer can't be loaded: {first_line(error)}"
        fix = "copy the model's tokenizer files there"
        raise ConfigError(key, path, problem, fix) from None
    return tokenizer


def check_prompts(
    config: Config, train: Sequence[Prompt], held_out: Sequence[Prompt], vocab_size: int
) -> None:
    """Enough prompts for a batch, of token ids that the model has; else ``PromptError``."""
    size = config.rollout.rollout_batch_size
    if len(train) < size:
        raise PromptError(
            f"there are {len(train)} training prompts and rollout.rollout_batch_size is {size};"
            " lower it or add prompts"
        )
    for prompts in (*_by_source(train), *_by_source(held_out)):
        if isinstance(prompts, MappedPrompts) and prompts.largest_token < vocab_size:
            continue  # without reading them
        for prompt in prompts:
            if (largest := int(prompt.token_ids.max())) >= vocab_size:
                raise PromptError(
                    f"prompt {prompt.index} has the token id {largest}, the model's vocabulary ends"
                    f" at {vocab_size - 1}; tokenizer and config.json in model.path are of"
                    " different models"
                )


def prompt_cache(config: Config) -> PromptCache:
    """Where the processes of a node share their tokenised prompts."""

    def warn(line: str) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per node
            logger.warning(line)

    folder = Path(config.data.cache_dir or Path(config.run_dir) / "prompts")
    return PromptCache(folder, Path(config.model.path), warn)


def load_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, cache: PromptCache | None = None
) -> tuple[Sequence[Prompt], Sequence[Prompt], int]:
    """(training prompts, held-out prompts, prompts dropped for their length).

    cache: for prompts of files; None tokenises them. Those of a task are generated by every
    process. The first process prints what is doubtful about the prompts.
    """
    train: dict[str, Sequence[Prompt]] = {}
    held_out: dict[str, Sequence[Prompt]] = {}
    notes: list[str] = []
    dropped = 0
    for name, data in config.data.by_source.items():
        sets = _load_source(data, tokenizer, cache)
        train[name] = sets[0].prompts
        if len(sets) > 1:
            held_out[name] = sets[1].prompts[: config.evaluation.max_prompts]
        notes += [note for prompts in sets for note in prompts.notes]
        dropped += sum(prompts.dropped for prompts in sets)
    all_train = _joined(train)
    all_held_out = _joined(held_out)
    if os.environ.get("RANK", "0") == "0":
        for line in dict.fromkeys(notes):
            logger.info(f"note: {line}")
        if warning := shared_prompts(all_train, all_held_out):
            logger.warning(warning)
    return all_train, all_held_out, dropped


def _load_source(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, cache: PromptCache | None
) -> list[PromptSet]:
    """Training prompts, and held-out ones if there are any. data: of one source."""
    load = cache.load if cache is not None else load_prompts
    if data.task is not None:
        task = load_task(data.task, tokenizer, data)
        sets = [task.train] + ([task.evaluation] if task.evaluation else [])
    else:
        sets = [load(data.prompt_paths, tokenizer, data)]
    if data.eval_prompts:
        sets = [sets[0], load(data.eval_prompt_paths, tokenizer, data, split=HELD_OUT)]
    return sets


def _joined(prompts: dict[str, Sequence[Prompt]]) -> Sequence[Prompt]:
    """The prompts of all sources, by name; of the only one, which has none, as they are."""
    if not prompts:
        return []
    return prompts[""] if "" in prompts else MixedPrompts(prompts)


def _by_source(prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    return list(prompts.sources.values()) if isinstance(prompts, MixedPrompts) else [prompts]


def shared_prompts(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str:
    """A line if there are held-out prompts among the training prompts; else empty."""
    shared = np.isin(digests_of(held_out), digests_of(train))
    if not shared.any():
        return ""
    first = held_out[int(shared.argmax())].text
    return (
        f"{int(shared.sum()):,} of {len(held_out):,} held-out prompts are training prompts too, the"
        f" first is {show(first)}; the accuracy on them is no measure of what was learned: give"
        " other data.eval_prompts"
    )
