"""The cost of Routing Replay: steps with and without it on the same tokens, in one process.

R2 adds to the old policy's pass that routes are kept and brought to the samples, to an update that they are packed,
moved and looked up in place of a top-k. The rows time both and what the routing
metrics add; the last three count bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import Row, count_row, interleave, run_from_command_line, say, time_row
from benchmarks.step_vs_megatron import make_samples, synchronize, tiny_policy

TARGET = 1.03  # of an update with R2 to one without


def contestants(path: str, args: argparse.Namespace) -> tuple[dict[str, Callable[[], None]], Any, list[Any]]:
    """The phases with and without routes, on one policy and the same samples; the routes' shape and the samples."""
    from megatron_gspo.algorithms import preset
    from megatron_gspo.config import ParallelConfig, TrainingConfig
    from megatron_gspo.data.sample_batch import SampleBatch
    from megatron_gspo.mcore.process_groups import initialize
    from megatron_gspo.mcore.routing_replay.gather_results import routes_of_replica, routing_stats
    from megatron_gspo.mcore.routing_replay.micro_batch_routes import ReplayOptions
    from megatron_gspo.mcore.train_step import compute_log_probs, train_mini_batch
    from megatron_gspo.routing_replay.routes import RouteShape

    groups = initialize(ParallelConfig(), seed=0)
    policy = tiny_policy(path, ParallelConfig(), groups)
    shape = RouteShape.of_model(policy.shape)
    samples = make_samples(args.sequences, args.prompt_length, args.response_length, policy.shape.vocab_size)
    training = TrainingConfig(steps=1, global_batch_size=1, max_tokens_per_micro_batch=args.max_tokens)
    objective = preset("grpo")

    def record(options: ReplayOptions | None) -> None:
        done = compute_log_probs(
            policy, SampleBatch.of(samples), training, temperature=1.0, with_entropy=True, routing=options
        ).routing
        if done is not None:
            if options is not None and options.entropy:
                routing_stats(done)
            routes, _ = routes_of_replica(done, SampleBatch.of(samples), range(len(samples)))
            for i, ids in routes.items():
                samples[i].routed_experts = ids
        synchronize()

    def update(options: ReplayOptions | None) -> None:
        done = train_mini_batch(
            policy, SampleBatch.of(samples), objective, training, temperature=1.0, routing=options
        ).routing
        if done is not None and options is not None and options.compare:
            routing_stats(done)
        synchronize()

    tasks = {
        "record": (record, ReplayOptions(shape, record=True)),
        "record, metrics": (record, ReplayOptions(shape, record=True, entropy=True)),
        "log-probs": (record, None),
        "replay": (update, ReplayOptions(shape, replay=True)),
        "replay, metrics": (update, ReplayOptions(shape, replay=True, compare=True)),
        "update": (update, None),
    }
    record(tasks["record"][1])
    return {name: lambda run=run, task=task: run(task) for name, (run, task) in tasks.items()}, shape, samples


def measure(args: argparse.Namespace) -> list[Row]:
    """The rows of the table."""
    from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        size = TinyModel(layers=args.layers, experts=args.experts, experts_per_token=args.topk)
        count = write_tiny_model(folder, size)
        say(f"routing replay: {count:,} parameters, {args.repeats} repeats")
        runs, shape, samples = contestants(folder, args)
        taken = interleave(runs, repeats=args.repeats, warmup=3, seconds=args.seconds)
    note = (f"{args.sequences} sequences, {shape.layers} MoE layers, {shape.k} of {shape.num_experts} experts, "
            f"micro-batches of at most {args.max_tokens} tokens")  # fmt: skip

    def row(name: str, ours: str, peer: str, **more: Any) -> Row:
        return time_row("routing", name, taken[ours], taken[peer], peer_name="without routes", note=note, **more)

    return [
        row("update with R2", "replay", "update", target=TARGET),
        row("update with R2 and routing metrics", "replay, metrics", "update"),
        row("old log-probs, routes recorded (R2)", "record", "log-probs"),
        row("old log-probs, routes and router metrics", "record, metrics", "log-probs"),
        *byte_rows(samples, shape),
    ]


def byte_rows(samples: list[Any], shape: Any) -> list[Row]:
    """Bytes of a token's routes, kept in samples and packed for a pass, against int64 ids."""
    from megatron_gspo.data.packing import count_trained, pack
    from megatron_gspo.routing_replay.routes import RouteShape

    kept = sum(sample.routed_experts.nbytes for sample in samples) / sum(sample.length - 1 for sample in samples)
    sequences, tokens = count_trained(samples)
    packed = pack(samples, num_sequences=sequences, num_tokens=tokens, routes=shape).routed_experts
    large = RouteShape(48, 8, 128)
    found = {
        "routes kept, per token": (kept, shape),
        "routes packed for a pass, per position": (packed.nbytes / packed.shape[0], shape),
        "routes per token, 48 layers, 8 of 128 experts": (large.dtype.itemsize * 48.0 * 8, large),
    }
    return [
        count_row("routing", name, size, 8.0 * of.layers * of.k, unit="bytes", peer_name="int64 ids", target=1 / 8)
        for name, (size, of) in found.items()
    ]


def main() -> None:
    numbers = {"repeats": 25, "sequences": 64, "prompt-length": 8, "response-length": 24, "max-tokens": 4096,
               "layers": 4, "experts": 16, "topk": 4}  # fmt: skip
    run_from_command_line(__doc__, measure, numbers, seconds=120)


if __name__ == "__main__":
    main()
