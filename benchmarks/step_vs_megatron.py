"""The training step against bare Megatron: the same model, packed tokens, micro-batches and
schedule, one process.

Ours is ``policy_forward_step`` with GSPO: log-probs from hidden states, sequence ratios, clipping,
metrics. Bare is Megatron's own ``model(labels=...)``: vocabulary-parallel cross entropy and its
mean over the trained tokens. Both go through ``get_forward_backward_func()`` with zeroed gradient
buffers, backward and gradient finalisation; the optimizer is the same for both and in neither. The
layers are the same too (our torch modules on a CPU: Megatron has none that take packed sequences
there), so the rows are the cost of the objective: with a character vocabulary and short responses,
where its fixed cost shows most, and with 16k words and responses of some hundred tokens. Beside
them ours with R2, whose routers use the routes of the samples, against ours without routes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.common import Row, interleave, run_from_command_line, say, time_row


@dataclass(frozen=True)
class Size:
    """Of a mini-batch: ``sequences`` with ``prompt`` + about ``response`` tokens;
    ``vocabulary`` None: the tiny one.
    """

    sequences: int
    prompt: int
    response: int
    vocabulary: int | None = None


SIZES = {
    "short responses, 104 words": Size(64, 8, 24),
    "long responses, 16k words": Size(16, 32, 256, 16_384),
}
MAX_TOKENS = 4096  # of a micro-batch


def make_samples(
    count: int, prompt: int, response: int, vocabulary: int, seed: int = 0
) -> list[Any]:
    """Random responses; lengths vary by up to half around ``response``."""
    from megatron_gspo.data.sample import Sample

    draw = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        length = int(draw.integers(response - response // 2, response + response // 2 + 1))
        samples.append(
            Sample(
                prompt_index=i // 8,
                sample_index=i % 8,
                tokens=draw.integers(3, vocabulary, size=prompt + length),
                prompt_length=prompt,
                loss_mask=np.ones(length, dtype=bool),
                rollout_log_probs=None,
                finish_reason="stop",
                advantages=np.full(length, draw.normal(), dtype=np.float32),
                old_log_probs=draw.normal(-np.log(vocabulary), 0.01, size=length).astype(
                    np.float32
                ),
            )
        )
    return samples


def bare_forward_step(groups: Any) -> Callable[..., Any]:
    """A forward step whose loss is Megatron's own cross entropy, averaged over the trained
    tokens.
    """
    from megatron_gspo.mcore.attention import packed_sequences
    from megatron_gspo.mcore.process_groups import compute_device

    def forward_step(batches: Any, model: Any) -> Any:
        batch = next(batches).to(compute_device())
        sequences = packed_sequences(
            batch.cu_seqlens.cpu(), batch.max_seqlen, groups.cp, compute_device()
        )
        output = model(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            labels=batch.labels[None],
            packed_seq_params=sequences,
        )

        def loss_function(losses: torch.Tensor) -> Any:
            loss = (losses.view(-1).float() * batch.loss_mask).sum() / batch.loss_mask.sum()
            return loss, {"loss": loss.detach()}

        return output, loss_function

    return forward_step


def tiny_policy(path: str, parallel: Any, groups: Any) -> Any:
    """The model of a Hugging Face directory with Adam, at a rate that hardly changes the
    weights.
    """
    from megatron_gspo.config import ModelConfig, OptimizerConfig
    from megatron_gspo.mcore.policy import build_policy

    optimizer = OptimizerConfig(lr=1e-6, weight_decay=0.0)
    return build_policy(
        ModelConfig(path=str(path), dtype="float32"), parallel, groups, optimizer=optimizer
    )


def random_routes(shape: Any, samples: list[Any]) -> None:
    """Give each sample routes of different experts."""
    draw = np.random.default_rng(0)
    for sample in samples:
        order = np.argsort(draw.random((sample.length - 1, shape.layers, shape.num_experts)))
        sample.routed_experts = order[..., : shape.k].astype(shape.dtype)


def contestants(path: str, size: Size, groups: Any) -> dict[str, Callable[[], None]]:
    """Forward and backward of one mini-batch on one policy: ours, ours with R2, and bare
    Megatron's.
    """
    from megatron_gspo.algorithms import preset
    from megatron_gspo.config import ParallelConfig, TrainingConfig
    from megatron_gspo.data.training_batch import TrainingBatch
    from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
    from megatron_gspo.mcore.train_step import (
        forward_backward,
        mini_batch_routes,
        pack_mini_batch,
        run_schedule,
    )
    from megatron_gspo.routing_replay.routes import RouteShape

    policy = tiny_policy(path, ParallelConfig(), groups)
    samples = make_samples(size.sequences, size.prompt, size.response, policy.shape.vocab_size)
    say(f"{sum(sample.length for sample in samples)} tokens")
    shape = RouteShape.of_model(policy.shape)
    random_routes(shape, samples)
    replay = ReplayOptions(shape, replay=True)
    training = TrainingConfig(steps=1, global_batch_size=1, max_tokens_per_micro_batch=MAX_TOKENS)

    def packed(routing: ReplayOptions | None) -> Any:
        batches = pack_mini_batch(
            policy,
            TrainingBatch.of(samples),
            training,
            optional=("old_log_probs",),
            routing=routing,
        )
        return replace(batches, batches=list(batches.batches))

    plain = packed(None)
    routed = packed(replay)
    objective = preset("gspo")
    bare_step = bare_forward_step(policy.groups)

    def ours() -> None:
        forward_backward(policy, objective, plain, temperature=1.0)
        synchronize()

    def with_routes() -> None:
        routes = mini_batch_routes(policy, routed, replay)
        forward_backward(policy, objective, routed, temperature=1.0, routing=routes)
        synchronize()

    def bare() -> None:
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        policy.optimizer.zero_grad()
        run_schedule(policy, bare_step, plain, forward_only=False)
        synchronize()

    return {"ours": ours, "R2": with_routes, "bare": bare}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_model(folder: str, vocabulary: int | None) -> None:
    """A tiny model, with so many words if that isn't None."""
    from transformers import AutoModelForCausalLM

    from megatron_gspo.tools.make_tiny_model import write_tiny_model

    write_tiny_model(folder)
    if vocabulary is not None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(vocabulary)
        model.save_pretrained(folder)


def measure(args: argparse.Namespace) -> list[Row]:
    """Two rows for each size: ours against bare, and ours with R2 against ours without."""
    from megatron_gspo.config import ParallelConfig
    from megatron_gspo.mcore.process_groups import initialize

    torch.set_num_threads(1)
    groups = initialize(ParallelConfig(), seed=0)
    rows = []
    for name, size in SIZES.items():
        say(f"training step against bare Megatron: {name}")
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, size.vocabulary)
            taken = interleave(
                contestants(folder, size, groups),
                repeats=args.repeats,
                warmup=2,
                seconds=args.seconds / len(SIZES),
            )
        rows.append(
            time_row(
                "step_vs_megatron",
                f"forward and backward of a step, {name}",
                taken["ours"],
                taken["bare"],
                peer_name="Megatron, cross entropy",
            )
        )
        rows.append(
            time_row(
                "step_vs_megatron",
                f"the same with R2, {name}",
                taken["R2"],
                taken["ours"],
                peer_name="without routes",
            )
        )
    return rows


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 40}, seconds=70)


if __name__ == "__main__":
    main()
