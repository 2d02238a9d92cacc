"""Checks of keys against each other, the number of processes, the model and the files.

Each raises ConfigError and returns nothing. None imports Megatron or allocates anything.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gspo.config.config_error import ConfigError, show
from megatron_gspo.config.model_sections import ParallelConfig
from megatron_gspo.config.rollout_checks import check_correction, check_environment, check_environment_file
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.sglang_checks import check_server_files, check_sglang
from megatron_gspo.config.training_sections import EvaluationConfig
from megatron_gspo.errors import existing_part

if TYPE_CHECKING:
    from megatron_gspo.config.schema import Config

VERIFIERS = ("exact_match", "math_verify", "reasoning_gym")
MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2_moe")  # conversion.FAMILIES, which --help must not import: it needs torch


def check_choices(config: Config) -> None:
    """What contradicts itself whatever the machine."""
    _check_algorithm(config)
    _check_sampling(config.rollout, config.evaluation)
    check_correction(config)
    check_environment(config)
    _check_data(config)
    _check_parallel(config.parallel)
    _check_training(config)
    _check_routing(config)
    _check_evaluation(config)
    check_sglang(config)


def _check_algorithm(config: Config) -> None:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.is_supervised != (rollout.engine == "sft"):
        fix = "set rollout.engine: sft" if algorithm.is_supervised else "set algorithm.name: sft"
        raise ConfigError(
            "rollout.engine", rollout.engine, f"does not go with algorithm.name = {show(algorithm.name)}", fix
        )
    samples = rollout.n_samples_per_prompt
    if algorithm.is_supervised and samples != 1:
        problem = "sft has one response per prompt"
        raise ConfigError("rollout.n_samples_per_prompt", samples, problem, "set it to 1")
    if not algorithm.is_supervised and samples < 2:
        problem = "group advantages compare at least two responses"
        raise ConfigError("rollout.n_samples_per_prompt", samples, problem, "set it to 2 or more, 8 is usual")
    for key in ("kl_reward_coef", "dynamic_sampling"):
        value = getattr(algorithm, key)
        if algorithm.is_supervised and value:
            raise ConfigError(f"algorithm.{key}", value, "sft has no rewards", "remove the key")
    _check_length_shaping(config)
    if algorithm.kl_loss_coef and algorithm.kl_reward_coef:
        problem = "counts the KL twice, with algorithm.kl_loss_coef"
        raise ConfigError(
            "algorithm.kl_reward_coef", algorithm.kl_reward_coef, problem, "set one of the two to 0"
        )
    if algorithm.needs_reference and config.model.init == "random":
        key = "kl_loss_coef" if algorithm.kl_loss_coef else "kl_reward_coef"
        problem = "is the KL to the starting weights, which are random"
        fix = "set model.init: pretrained, or this to 0"
        raise ConfigError(f"algorithm.{key}", getattr(algorithm, key), problem, fix)


def _check_sampling(rollout: RolloutConfig, evaluation: EvaluationConfig) -> None:
    """Training samples come from the distribution that their log-probs are of."""
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        if (value := getattr(rollout, key)) != off:
            problem = "training log-probs are over the whole vocabulary"
            raise ConfigError(f"rollout.{key}", value, problem, f"set {off:g}, or evaluation.{key} for evaluation")
        if evaluation.temperature == 0 and (value := getattr(evaluation, key)) != off:
            problem = "has no effect with evaluation.temperature = 0"
            raise ConfigError(f"evaluation.{key}", value, problem, "remove it, or set a temperature above 0")
    if rollout.temperature == 0:
        problem = "greedy responses to one prompt are all equal"
        raise ConfigError("rollout.temperature", rollout.temperature, problem, "set it above 0, 1 is usual")


def _check_length_shaping(config: Config) -> None:
    algorithm, longest = config.algorithm, config.rollout.max_response_length
    buffer, key = algorithm.overlong_buffer_len, "algorithm.overlong_buffer_len"
    if algorithm.truncated == "penalize" and not 0 < buffer <= longest:
        problem = "truncated: penalize needs a buffer inside the response"
        raise ConfigError(
            key, buffer, problem, f"set 1 to {longest} (rollout.max_response_length), a quarter is usual"
        )
    if algorithm.truncated != "penalize" and buffer:
        problem = f"has no effect with algorithm.truncated = {show(algorithm.truncated)}"
        raise ConfigError(key, buffer, problem, "set algorithm.truncated: penalize, or remove it")


def _check_data(config: Config) -> None:
    data = config.data
    if (data.prompts is None) == (data.task is None):
        problem = "the prompts come from exactly one of data.prompts and data.task"
        raise ConfigError("data.prompts", data.prompts, problem, "set one and leave the other null")
    verifier = data.resolved_verifier
    if verifier == "reasoning_gym" and data.task is None:
        fix = f"set data.task, or one of {', '.join(VERIFIERS[:2])}, file.py:function"
        raise ConfigError("data.verifier", verifier, "needs data.task", fix)
    place, _, function = verifier.rpartition(":")
    named = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if verifier not in VERIFIERS and not (named and function.isidentifier()):
        fix = f"set one of {', '.join(VERIFIERS)}, path/to/file.py:function or package.module:function"
        raise ConfigError("data.verifier", verifier, "is no verifier", fix)
    if verifier in VERIFIERS[:2] and data.answer_key is None and data.task is None:
        fix = "name the field with the reference answer"
        raise ConfigError("data.answer_key", None, f"the verifier {verifier} compares with it", fix)
    if "{question}" not in data.prompt_template:
        fix = "put {question} where the question goes"
        raise ConfigError("data.prompt_template", data.prompt_template, "would drop the question", fix)
    if data.system_prompt is not None and not data.chat_template:
        fix = "set data.chat_template: true, or write it into data.prompt_template"
        raise ConfigError("data.system_prompt", data.system_prompt, "needs the chat template", fix)


def _check_parallel(parallel: ParallelConfig) -> None:
    if (
        parallel.virtual_pipeline_model_parallel_size is not None
        and parallel.pipeline_model_parallel_size == 1
    ):
        value = parallel.virtual_pipeline_model_parallel_size
        fix = "set parallel.pipeline_model_parallel_size above 1, or this to null"
        raise ConfigError("parallel.virtual_pipeline_model_parallel_size", value, "needs a pipeline", fix)
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        problem, fix = "splits tokens between tensor-parallel ranks and there is one", "set it to null"
        raise ConfigError("parallel.sequence_parallel", True, problem, fix)
    if parallel.overlap_param_gather:
        for key in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if not getattr(parallel, key):
                fix = f"set parallel.{key}: true, or this to false"
                raise ConfigError("parallel.overlap_param_gather", True, f"needs parallel.{key}", fix)


def _check_training(config: Config) -> None:
    training, optimizer = config.training, config.optimizer
    sequences, batch = config.rollout.sequences, training.global_batch_size
    if sequences % batch:
        problem = (
            f"does not divide the {sequences} sequences of a rollout batch (prompts x samples per prompt)"
        )
        fix = f"set a divisor of {sequences}, or change rollout.rollout_batch_size"
        raise ConfigError("training.global_batch_size", batch, problem, fix)
    if config.model.recompute_num_layers is not None and config.model.recompute_granularity != "full":
        value = config.model.recompute_num_layers
        fix = "set model.recompute_granularity: full, or this to null"
        raise ConfigError("model.recompute_num_layers", value, "needs recompute_granularity: full", fix)
    if optimizer.lr_decay_style == "constant" and optimizer.min_lr:
        problem, fix = "a constant schedule never reaches it", "set optimizer.lr_decay_style: linear or cosine"
        raise ConfigError("optimizer.min_lr", optimizer.min_lr, problem, fix)
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            "optimizer.min_lr", optimizer.min_lr, f"is above optimizer.lr = {optimizer.lr}", "lower it"
        )
    if optimizer.lr_warmup_steps > config.optimizer_steps:
        problem = f"is longer than the run's {config.optimizer_steps} optimizer steps"
        raise ConfigError(
            "optimizer.lr_warmup_steps", optimizer.lr_warmup_steps, problem, "lower it or raise training.steps"
        )


def _check_routing(config: Config) -> None:
    routing, algorithm = config.routing, config.algorithm
    if routing.replay != "none" and not algorithm.has_ratio:
        problem = f"{algorithm.name} has no old policy whose routes could be replayed"
        raise ConfigError("routing.replay", routing.replay, problem, "set it to none")
    if routing.replay == "r2" and algorithm.old_log_probs == "rollout":
        problem = "records the routes in the pass that algorithm.old_log_probs = rollout leaves out"
        raise ConfigError("routing.replay", "r2", problem, "set it to r3, or algorithm.old_log_probs: recompute")
    if routing.missing_routes == "live" and routing.replay != "r3":
        problem = f"has no effect with routing.replay = {show(routing.replay)}"
        raise ConfigError("routing.missing_routes", "live", problem, "set routing.replay: r3, or remove it")
    if routing.compare_rollout and not (routing.metrics and algorithm.has_ratio):
        key = "routing.metrics = false" if algorithm.has_ratio else f"algorithm.name = {algorithm.name}"
        raise ConfigError("routing.compare_rollout", True, f"has no effect with {key}", "remove it")


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    if evaluation.eval_interval and not config.data.has_eval_prompts:
        problem, fix = "there are no held-out prompts", "set data.eval_prompts or data.task.eval_size"
        raise ConfigError("evaluation.eval_interval", evaluation.eval_interval, problem, fix)
    if evaluation.temperature == 0 and evaluation.n_samples > 1:
        problem = "greedy responses to one prompt are all the same"
        raise ConfigError(
            "evaluation.n_samples", evaluation.n_samples, problem, "set 1, or a temperature above 0"
        )
    if evaluation.pass_at_k and max(evaluation.pass_at_k) > evaluation.n_samples:
        problem = f"pass@k needs k <= evaluation.n_samples = {evaluation.n_samples}"
        raise ConfigError(
            "evaluation.pass_at_k", evaluation.pass_at_k, problem, "raise n_samples or drop the larger k"
        )


def check_layout(parallel: ParallelConfig, world_size: int) -> None:
    """Dense (TP x PP x CP) and expert (ETP x EP x PP) ranks must each divide world_size."""
    dense = parallel.model_parallel_size
    if world_size % dense:
        sizes = (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
        )
        problem = (
            f"TP x PP x CP = {' x '.join(map(str, sizes))} = {dense} does not divide {world_size} processes"
        )
        fix = f"start a multiple of {dense} processes or lower a size"
        raise ConfigError("parallel.tensor_model_parallel_size", sizes[0], problem, fix)
    pipeline = parallel.pipeline_model_parallel_size
    sizes = (parallel.expert_tensor_size, parallel.expert_model_parallel_size, pipeline)
    expert = sizes[0] * sizes[1] * sizes[2]
    if world_size % expert:
        problem = (
            f"ETP x EP x PP = {' x '.join(map(str, sizes))} = {expert} does not divide {world_size} processes"
        )
        fix = f"set a divisor of {world_size // pipeline // sizes[0]}" if sizes[0] == 1 else "lower EP or ETP"
        raise ConfigError("parallel.expert_model_parallel_size", sizes[1], problem, fix)


def check_batches(config: Config, world_size: int) -> None:
    """The longest sequence fits the token budget; fixed micro-batches fill every rank."""
    training, parallel = config.training, config.parallel
    ranks = parallel.data_parallel_size(world_size)
    count = training.micro_batch_size
    if count is not None and training.global_batch_size % (count * ranks):
        problem = f"micro_batch_size {count} x {ranks} data-parallel ranks does not divide it"
        fix = f"set a multiple of {count * ranks}, or training.micro_batch_size: null"
        raise ConfigError("training.global_batch_size", training.global_batch_size, problem, fix)
    if training.global_batch_size < ranks:
        problem = f"leaves some of the {ranks} data-parallel ranks without a sequence"
        raise ConfigError(
            "training.global_batch_size", training.global_batch_size, problem, f"set at least {ranks}"
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    padded = -(-longest // parallel.total_multiple) * parallel.total_multiple
    if count is None and training.max_tokens_per_micro_batch < padded:
        problem = (
            f"a sequence may take {padded} tokens (data.max_prompt_length + rollout.max_response_length, "
            f"padded to a multiple of {parallel.total_multiple})"
        )
        value = training.max_tokens_per_micro_batch
        raise ConfigError("training.max_tokens_per_micro_batch", value, problem, f"set at least {padded}")


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face model directory."""
    file = Path(path) / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        problem = "has no config.json" if Path(path).is_dir() else "is not a directory"
        fix = "give a local Hugging Face model directory (hf download MODEL --local-dir DIR)"
        raise ConfigError("model.path", str(path), problem, fix) from None
    except ValueError:
        raise ConfigError(
            "model.path", str(path), "its config.json is not JSON", "download it again"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError("model.path", str(path), "its config.json is not a mapping", "download it again")
    return data


def check_model(config: Config, hf: dict[str, Any]) -> None:
    """The layout must divide the model; hf is its config.json."""
    kind = hf.get("model_type")
    if kind not in MODEL_TYPES:
        problem = f"its config.json has model_type {show(kind)}"
        raise ConfigError("model.path", config.model.path, problem, f"use one of {', '.join(MODEL_TYPES)}")
    from megatron_gspo.models.model_shape import ModelError, check_sizes  # loads torch, which --help does without

    try:
        check_sizes(hf)
    except ModelError as error:
        raise ConfigError("model.path", config.model.path, str(error), "download it again") from None
    check_divisibility(config.parallel, hf)
    for key, off in (("replay", "none"), ("compare_rollout", False)):
        if getattr(config.routing, key) != off and not (hf.get("num_experts") or hf.get("num_local_experts")):
            value, fix = getattr(config.routing, key), f"set it to {str(off).lower()}"
            raise ConfigError(f"routing.{key}", value, "the model has no experts", fix)
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    limit = hf.get("max_position_embeddings")
    if limit is not None and longest > limit:
        problem = f"with data.max_prompt_length it makes {longest} tokens and the model has {limit} positions"
        value = config.rollout.max_response_length
        fix = f"keep the sum within {limit}"
        raise ConfigError("rollout.max_response_length", value, problem, fix)


def check_divisibility(parallel: ParallelConfig, hf: dict[str, Any]) -> None:
    """Heads, key-value groups, widths, layers and experts of a config.json against the parallel sizes."""
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    experts = hf.get("num_experts") or hf.get("num_local_experts") or 0  # Transformers 5 writes the latter
    for key in ("num_attention_heads", "num_key_value_heads") + (() if experts else ("intermediate_size",)):
        _divides("tensor_model_parallel_size", tensor, key, hf.get(key))
    virtual = parallel.virtual_pipeline_model_parallel_size
    extra = parallel.extra_pipeline_layers
    layers = None if hf.get("num_hidden_layers") is None else hf["num_hidden_layers"] + extra
    _divides("pipeline_model_parallel_size", pipeline, f"num_hidden_layers{f' + {extra}' if extra else ''}", layers)
    if virtual is not None:
        layers = (layers or 0) // pipeline
        _divides("virtual_pipeline_model_parallel_size", virtual, "layers of a pipeline stage", layers)
    if experts:
        _divides("expert_model_parallel_size", parallel.expert_model_parallel_size, "num_experts", experts)
        width = hf.get("moe_intermediate_size")
        _divides("expert_tensor_parallel_size", parallel.expert_tensor_size, "moe_intermediate_size", width)
        shared = hf.get("shared_expert_intermediate_size")
        _divides("tensor_model_parallel_size", tensor, "shared_expert_intermediate_size", shared)
        if tensor > 1 and not parallel.use_sequence_parallel:
            problem = "a mixture of experts with tensor parallelism needs it"
            raise ConfigError("parallel.sequence_parallel", False, problem, "set it to null or true")
        return
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (value := getattr(parallel, name) or 1) > 1:
            raise ConfigError(f"parallel.{name}", value, "the model has no experts", "set it to 1")


def _divides(name: str, size: int, quantity: str, amount: int | None) -> None:
    if amount is not None and amount % size:
        divisors = [d for d in range(1, amount + 1) if amount % d == 0]
        fix = f"set one of {', '.join(map(str, divisors[:8]))}"
        raise ConfigError(f"parallel.{name}", size, f"does not divide the model's {quantity} = {amount}", fix)


def check_files(config: Config) -> None:
    """Files that the config names exist, and its run_dir can be written."""
    _check_run_dir(config)
    check_server_files(config.sglang)
    check_environment_file(config.rollout)
    data = config.data
    for key in ("prompts", "eval_prompts"):
        path = getattr(data, key)
        if path is not None and not Path(path).exists():
            fix = "give a path relative to the working directory, or an absolute one"
            raise ConfigError(f"data.{key}", path, "no such file", fix)
    file, _, _ = data.resolved_verifier.rpartition(":")
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(
            "data.verifier", data.verifier, f"no such file: {file}", "give its path, then :function"
        )
    weights = Path(config.model.path)
    if config.model.init == "pretrained" and not any(weights.glob("*.safetensors")):
        problem, fix = "has no *.safetensors weights", "download them, or set model.init: random"
        if any(weights.glob("*.bin")):
            problem += ", only pickled ones (*.bin), which could run code as they load"
            fix = "load the model with Transformers and save_pretrained it"
        raise ConfigError("model.path", config.model.path, problem, fix)


def _check_run_dir(config: Config) -> None:
    folder = Path(config.run_dir)
    place = existing_part(folder)
    if not place.is_dir():
        raise ConfigError("run_dir", config.run_dir, f"{place} is a file", "choose another directory")
    if not os.access(place, os.W_OK | os.X_OK):
        problem = f"{place} can't be written by this user"
        raise ConfigError("run_dir", config.run_dir, problem, "make it writable or choose another directory")
    if config.checkpoint.resume == "never" and (folder / "metrics.jsonl").exists():
        fix = "choose another run_dir or set checkpoint.resume: auto"
        raise ConfigError("run_dir", config.run_dir, "holds another run", fix)
