"""The stream of whole Hugging Face tensors out of Megatron's shards, which feeds servers and export: speed and memory.

Compared, interleaved on the same processes: a copy of the same bytes (``clone`` of one tensor of that size), and where
ranks hold parts gloo's all-gather of them in one piece, which brings the same bytes to every rank. Every rank gets
every tensor. Rates are bytes of the whole model over time. Memory: the largest sum of live tensors' bytes above the
model, counted by torch's dispatcher, against the bytes of the largest layer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import Row, Seconds, count_row, rate_row, run_from_command_line, say
from benchmarks.worlds import World, in_turns

WHAT = ("stream", "copy", "gather")
TARGET = 0.7  # of the machine's own speed
LAYOUTS = {"TP 1": (1, {}), "TP 2, EP 2": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2})}


def prepare(rank: int, size: int, path: str, sizes: dict[str, int], facts: str) -> dict[str, Callable[[], None]]:
    """The contestants on one rank; rank 0 writes what doesn't vary to the file ``facts``."""
    import torch
    import torch.distributed as dist

    from megatron_gspo.config import ModelConfig, ParallelConfig
    from megatron_gspo.mcore.policy import build_policy
    from megatron_gspo.mcore.process_groups import initialize

    layout = ParallelConfig(**sizes)
    model = ModelConfig(path=path, dtype="float32")
    policy = build_policy(model, layout, initialize(layout, seed=0), optimizer=None)
    found = measure_stream(policy)
    part = torch.ones(found["bytes"] // 4 // size)
    whole, gathered = torch.ones(found["bytes"] // 4), torch.ones(part.numel() * size)
    if rank == 0:
        Path(facts).write_text(json.dumps(found))

    def stream() -> None:
        for _, tensor in policy.weights():
            tensor.contiguous()

    def copy() -> None:
        whole.clone()

    def gather() -> None:
        dist.all_gather_into_tensor(gathered, part)

    return {"stream": stream, "copy": copy, "gather": gather}


def measure_stream(policy: Any) -> dict[str, Any]:
    """Bytes of the model, of its largest layer, and the most that a stream holds above the model."""
    from benchmarks.live_storages import LiveStorages

    layers: dict[str, int] = {}
    total = 0
    with LiveStorages() as live:
        for name, tensor in policy.weights():
            tensor.contiguous()
            total += tensor.nbytes
            layer = ".".join(name.split(".")[:3]) if ".layers." in name else "outer"
            layers[layer] = layers.get(layer, 0) + tensor.nbytes
    return {"bytes": total, "layer": max(layers.values()), "peak": live.peak}


def rows_of(world: str, taken: dict[tuple[str, str], list[Seconds]], facts: dict[str, Any], note: str) -> list[Row]:
    """Speed against a copy and, with several ranks, against an all-gather."""
    size = LAYOUTS[world][0]

    def rates(name: str) -> list[dict[str, float]]:
        return [{"amount": facts["bytes"] / 1e6, "seconds": turn.wall, "cpu_seconds": turn.cpu}
                for turn in taken[world, name]]  # fmt: skip

    peers = [("copy", "clone of the same bytes")]
    if size > 1:
        peers.insert(0, ("gather", "all-gather of the same bytes"))
    rows = [
        rate_row("weight_export", f"{world}: stream of whole tensors", rates("stream"), rates(peer), unit="MB/s",
                 peer_name=title, target=TARGET, note=note)
        for peer, title in peers
    ]  # fmt: skip
    memory = count_row("weight_export", f"{world}: extra memory", facts["peak"] / 1e6, facts["layer"] / 1e6, unit="MB",
                       peer_name="largest layer", note=note)  # fmt: skip
    return [*rows, memory]


def measure(args: argparse.Namespace) -> list[Row]:
    """The rows of the table."""
    from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

    hidden, layers = (256, 4) if args.quick else (args.hidden, args.layers)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = TinyModel(hidden, layers, experts=16, expert_width=3 * hidden // 4, heads=hidden // 32,
                          key_value_heads=4)  # fmt: skip
        count = write_tiny_model(folder / "model", model)
        say(f"weight export: {count:,} parameters, {4 * count / 1e6:.0f} MB")
        worlds = {
            world: stack.enter_context(
                World(size, prepare, str(folder / "model"), sizes, str(folder / f"{number}.json"))
            )
            for number, (world, (size, sizes)) in enumerate(LAYOUTS.items())
        }
        for world in worlds.values():
            world.ready()
        contestants = {(name, what): (world, what) for name, world in worlds.items() for what in WHAT}
        taken = in_turns(contestants, args.repeats, args.seconds)
        note = f"{count / 1e6:.0f} million float32 parameters, {layers} layers of 16 experts"
        facts = [json.loads((folder / f"{number}.json").read_text()) for number in range(len(worlds))]
        return [row for world, found in zip(worlds, facts, strict=True) for row in rows_of(world, taken, found, note)]


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 15, "hidden": 512, "layers": 6}, seconds=40)


if __name__ == "__main__":
    main()
