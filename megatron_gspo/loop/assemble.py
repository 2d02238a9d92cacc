"""From a checked config to the objects of a run on this rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_gspo.algorithms import Objective
from megatron_gspo.config import Config, ConfigError, SamplingParams
from megatron_gspo.data.prompts import PromptError, PromptFormat, PromptSource, load_prompts
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.tasks import TaskSpec, load_task
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.errors import first_line
from megatron_gspo.loop.engines import build_engines
from megatron_gspo.loop.timers import UpdateClock
from megatron_gspo.mcore.model import ModelSettings
from megatron_gspo.mcore.policy import DataParallelSettings, OptimizerSettings, Policy, build_policy
from megatron_gspo.mcore.process_groups import Layout, initialize
from megatron_gspo.mcore.train_step import Batching
from megatron_gspo.models import ModelError, ModelShape, check_names, family_of, read_config
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.rewards.scorer import RewardScorer
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from megatron_gspo.rollout.server_engine.server_engine import ServerEngine
from megatron_gspo.routing_replay.routes import RouteShape

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass
class Run:
    """Everything that the phases of the loop share. ``engine`` makes the training samples, ``eval_engine`` the
    held-out ones (the same object except under supervised training); ``reference`` is the frozen starting policy.
    ``stream``: groups that outlive a step, on the rank that is the servers' client. ``weights_version``: of the weights
    that the engine was last sent. ``environments``: where samples are multi-turn episodes."""

    config: Config
    objective: Objective
    policy: Policy
    reference: Policy | None
    engine: RolloutEngine
    eval_engine: RolloutEngine | None
    scorer: RewardScorer
    source: PromptSource
    eval_prompts: list[Prompt]
    batching: Batching
    dropped_prompts: int
    tokenizer: Any
    stream: RequestStream | None = None
    weights_version: int = 0
    environments: EnvironmentPool | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.config.rollout

    @property
    def route_shape(self) -> RouteShape | None:
        """Sizes of a token's routes; None for a model without experts."""
        return RouteShape.of_model(self.policy.shape)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run directory."""
        return dist.get_rank() == 0

    @property
    def generates_on_policy(self) -> bool:
        """Whether the engine needs the new weights after every update."""
        return not self.config.algorithm.is_supervised

    def close(self) -> None:
        self.scorer.close()
        if self.environments is not None:
            self.environments.close()
        self.engine.close()
        if self.eval_engine is not None and self.eval_engine is not self.engine:
            self.eval_engine.close()


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


def assemble(config: Config, *, engine: RolloutEngine | None = None) -> Run:
    """Start the process groups and build everything. ``engine`` replaces the configured source of samples."""
    parallel, data, training = config.parallel, config.data, config.training
    shape = check_weights(config)
    disable_progress_bar()  # Transformers' own, one line a rank
    tokenizer = load_tokenizer(config)
    try:
        train, held_out, dropped = load_data(config, tokenizer)
    except ImportError as error:  # an optional package; the message says which and how to get it
        raise PromptError(str(error)) from None
    check_prompts(config, train, held_out, shape.vocab_size)
    environments = make_environments(config)
    scorer = RewardScorer(
        data.resolved_verifier,
        data.verifier_options,
        timeout=None if environments else data.verifier_timeout,  # it scores nothing there and needs no processes
        workers=data.verifier_workers,
        failure_reward=data.verifier_failure_reward,
    )
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
    engine, eval_engine = build_engines(config, shape, tokenizer, held_out, engine)
    stream = engine.stream() if config.rollout.streams and isinstance(engine, ServerEngine) else None
    return Run(
        config=config,
        objective=config.algorithm,
        policy=policy,
        reference=reference,
        engine=engine,
        eval_engine=eval_engine,
        scorer=scorer,
        source=PromptSource(train, seed=config.seed, shuffle=data.shuffle),
        eval_prompts=held_out,
        batching=Batching(training.max_tokens_per_micro_batch, training.micro_batch_size),
        dropped_prompts=dropped,
        tokenizer=tokenizer,
        environments=environments,
        stream=stream,
    )


def make_environments(config: Config) -> EnvironmentPool | None:
    """This rank's environments, under the limits of verifiers; None where the config has none."""
    rollout, data = config.rollout, config.data
    if rollout.environment is None:
        return None
    return EnvironmentPool(rollout.environment, rollout.environment_options, timeout=data.verifier_timeout,
                           workers=data.verifier_workers)


def check_weights(config: Config) -> ModelShape:
    """The model's sizes. The checkpoint must be whole and hold just the tensors that its config.json asks for; else
    ``ConfigError``."""
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
    """The model's tokenizer; ``ConfigError`` where there is none that works."""
    path = config.model.path
    if not any((Path(path) / name).is_file() for name in _TOKENIZERS):  # the library makes an empty one
        problem = f"has no tokenizer (none of {', '.join(_TOKENIZERS)})"
        raise ConfigError("model.path", path, problem, "copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the library raises what it likes, also for damaged files
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
    form = PromptFormat(
        data.prompt_key,
        data.answer_key,
        data.prompt_template,
        data.chat_template,
        data.system_prompt,
        data.max_prompt_length,
        data.overlong_prompts,
    )
    if data.task is not None:
        task = load_task(TaskSpec(**asdict(data.task)), tokenizer, form)
        sets = [task.train] + ([task.evaluation] if task.evaluation else [])
    else:
        sets = [load_prompts(data.prompts or "", tokenizer, form)]
    if data.eval_prompts:
        sets = [sets[0], load_prompts(data.eval_prompts, tokenizer, form)]
    held_out = sets[1].prompts[: config.evaluation.max_prompts] if len(sets) > 1 else []
    return sets[0].prompts, held_out, sum(prompts.dropped for prompts in sets)


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
