"""The mini-batch of a rehearsal: the fewest synthetic samples that exercise the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.columns import Columns
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.routing_replay.routes import RouteShape
from megatron_gspo.tools.rehearse.routing import expert_ids


@dataclass(frozen=True)
class MiniBatchPlan:
    """Sizes of the rehearsed mini-batch.

    samples: of all ranks. micro_batches: of each data-parallel rank; the real mini-batch has
    ``of_all``. sequences: of a micro-batch. is_fixed: whether each micro-batch gets so many, and
    not what its token budget holds.
    """

    samples: int
    micro_batches: int
    of_all: int
    sequences: int
    is_fixed: bool


def plan_mini_batch(config: Config, world_size: int) -> MiniBatchPlan:
    """The fewest micro-batches with the schedule's steady state: two without pipeline stages,
    otherwise one more than there are stages, and two rounds of the stages where they are
    interleaved; at most those of the config, but two.
    """
    parallel = config.parallel
    training = config.training
    ranks = parallel.data_parallel_size(world_size)
    length = config.data.max_prompt_length + config.rollout.max_response_length
    padded = -(-length // parallel.sequence_multiple) * parallel.sequence_multiple
    budget = training.max_tokens_per_micro_batch
    sequences = training.micro_batch_size or max(
        (budget - budget % parallel.total_multiple) // padded, 1
    )
    sequences = min(sequences, -(-training.global_batch_size // ranks))
    stages = parallel.pipeline_model_parallel_size
    is_interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    of_all = max(-(-training.global_batch_size // (ranks * sequences)), 1)
    fewest = 2 * stages if is_interleaved else stages + 1
    micro_batches = max(min(of_all, fewest), 2)
    if is_interleaved:  # whole rounds
        micro_batches = -(-micro_batches // stages) * stages
        of_all = -(-of_all // stages) * stages
    is_fixed = training.micro_batch_size is not None or micro_batches > of_all
    most = micro_batches * ranks * sequences
    samples = most if is_fixed else min(training.global_batch_size, most)
    return MiniBatchPlan(samples, micro_batches, of_all, sequences, is_fixed)


def with_plan(config: Config, plan: MiniBatchPlan) -> Config:
    """The config with which the trainer makes the plan's micro-batches of its samples."""
    if not plan.is_fixed:
        return config
    return replace(config, training=replace(config.training, micro_batch_size=plan.sequences))


def synthetic_batch(
    config: Config,
    replica: np.ndarray,
    dp: dist.ProcessGroup,
    vocab_size: int,
    sizes: RouteShape | None,
    *,
    imbalance: float = 1.0,
) -> TrainingBatch:
    """Samples of the longest prompts and responses of the config, all equal, with the ids that the
    rollout engine and a teacher would return; with routes of these sizes where the trainer takes
    those of the rollout. They share their arrays.

    replica: [N] rank in dp, of the replica that trains each sample.
    """
    prompt = config.data.max_prompt_length
    response = config.rollout.max_response_length
    tokens = np.arange(prompt + response, dtype=np.int64) % min(vocab_size, 1000)
    routes = None
    if config.routing.needs_rollout_routes and sizes is not None:
        routes = _routes(
            len(tokens) - 1, sizes, config.parallel.expert_model_parallel_size, imbalance
        )
    top_ids = top_log_probs = None
    if count := config.algorithm.score_centering:
        top_ids = np.tile(np.arange(count, dtype=np.int32), (response, 1))
        top_log_probs = np.full((response, count), -8.0, dtype=np.float32)
    support_ids = support_lengths = None
    if width := min(config.rollout.max_support, vocab_size):
        # Each has the token and those after it.
        ids = (tokens[prompt:, None] + np.arange(width)) % vocab_size
        support_ids = ids.astype(np.int32).ravel()
        support_lengths = np.full(response, width, dtype=np.int32)
    sample = Sample(
        prompt_index=0,
        sample_index=0,
        tokens=tokens,
        prompt_length=prompt,
        loss_mask=np.ones(response, dtype=np.bool_),
        rollout_log_probs=np.full(response, -2.0, dtype=np.float32),
        finish_reason="length",
        reward=0.0,
        advantages=np.ones(response, dtype=np.float32),
        routed_experts=routes,
        rollout_top_ids=top_ids,
        rollout_top_log_probs=top_log_probs,
        support_ids=support_ids,
        support_lengths=support_lengths,
    )
    alone = TrainingBatch.of([sample])
    if config.algorithm.score_centering:
        alone = alone.with_column("centering_advantages", alone.responses["advantages"])
    if count := config.distillation.num_ids:
        ids = np.tile(np.arange(count, dtype=np.int32), (response, 1))
        alone = alone.with_column("teacher_top_ids", ids)
        log_probs = np.full((response, count), -8.0, dtype=np.float32)
        alone = alone.with_column("teacher_top_log_probs", log_probs)
    numbers = np.arange(len(replica))
    table = np.repeat(alone.table, len(replica))
    table["prompt_index"] = numbers // config.rollout.n_samples_per_prompt
    table["sample_index"] = numbers % config.rollout.n_samples_per_prompt
    table["reward"] = numbers % 2
    table["holder"] = replica
    positions = np.flatnonzero(replica == dp.rank())
    return TrainingBatch(
        table,
        dp,
        inputs=_repeated(alone.inputs, positions),
        rows=_repeated(alone.rows, positions),
        responses=_repeated(alone.responses, positions),
        supports=_repeated(alone.supports, positions),
    )


def _repeated(columns: Columns, positions: np.ndarray) -> Columns:
    """The columns of one sample as those of the samples at these positions, which share them."""
    starts = np.zeros(len(positions), dtype=np.int64)
    return Columns(positions, starts, starts + columns.num_tokens, columns.arrays)


def _routes(rows: int, sizes: RouteShape, expert_parallel: int, imbalance: float) -> np.ndarray:
    """Routes ``[rows, held layers, k]``, the same in each layer."""
    ids = expert_ids(
        rows, sizes.num_experts, sizes.k, expert_parallel=expert_parallel, imbalance=imbalance
    )
    layer = ids.numpy().astype(sizes.dtype)[:, None, :]
    return np.broadcast_to(layer, (rows, len(sizes.held_layers), sizes.k))
