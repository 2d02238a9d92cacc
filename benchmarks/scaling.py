"""Scaling on this machine: one step in 1, 2, 4 and 8 processes, and its cost against tokens, experts and length.

*Processes*: forward and backward of one mini-batch of fixed size (GSPO, gradients reduced), shared by data, tensor,
expert or pipeline parallelism. More processes than cores cannot be faster: *speedup* is compared with the cores that so
many processes can use, so its ratio is the efficiency. *processor time* against one process's is the cost of sharing
the work (collectives, smaller products, work of every rank). Bare Megatron, the same step with its own
cross entropy, is timed interleaved.

*Cost*: one process, one quantity grows by doubling. Shown is the fitted exponent (least squares on the logarithms); the
ratio is that of the growth per doubling, 2 to the power of the exponents' difference. The peer is bare Megatron again.
"""

from __future__ import annotations

import argparse
import math
import operator
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import Row, Seconds, Spread, hardware, number, ratios, run_from_command_line, say, time_row
from benchmarks.step_vs_megatron import make_samples, steps_of, tiny_policy
from benchmarks.worlds import World, in_turns

BARE = "bare Megatron"
SIZES = (1, 2, 4, 8)
DIMENSIONS = ("data", "tensor", "expert", "pipeline")
SEQUENCES, PROMPT, RESPONSE = 32, 8, 64  # of the shared mini-batch
MAX_TOKENS = {"data": 4096, "tensor": 4096, "expert": 4096, "pipeline": 320}  # a pipeline needs several micro-batches


@dataclass(frozen=True)
class Point:
    """One size of a fit: a mini-batch and the number of experts of the model that does it."""

    size: int
    sequences: int
    response: int
    experts: int = 8
    max_tokens: int = 1152


FITS = {
    "tokens": [Point(72 * n, n, 64) for n in (16, 32, 64, 128)],
    "experts at top-2": [Point(n, 64, 64, experts=n) for n in (4, 8, 16, 32)],
    "length of one sequence": [Point(n, 1, n - 8, max_tokens=n) for n in (512, 1024, 2048, 4096)],
}


def fixed_lengths(samples: list[Any], response: int) -> list[Any]:
    """Samples with responses of one length, cut or repeated: a fit needs exact sizes."""
    import numpy as np

    for sample in samples:
        tokens = np.resize(sample.tokens[sample.prompt_length :], response)
        sample.tokens = np.concatenate([sample.tokens[: sample.prompt_length], tokens])
        for name in ("loss_mask", "advantages", "old_log_probs"):
            setattr(sample, name, np.resize(getattr(sample, name), response))
    return samples


def prepare_processes(rank: int, size: int, path: str, dimension: str) -> dict[str, Callable[[], None]]:
    """In every process of a world: the shared mini-batch, split along ``dimension``."""
    from megatron_gspo.config import ParallelConfig
    from megatron_gspo.mcore.process_groups import initialize

    layout = ParallelConfig()
    if dimension != "data":
        layout = ParallelConfig(**{f"{dimension}_model_parallel_size": size})
    groups = initialize(layout, seed=0)
    policy = tiny_policy(path, layout, groups)
    samples = make_samples(SEQUENCES, PROMPT, RESPONSE, policy.shape.vocab_size)
    return steps_of(policy, samples, MAX_TOKENS[dimension], peer=BARE)


def prepare_fits(rank: int, size: int, folder: str) -> dict[str, Callable[[], None]]:
    """In one process: every point of every fit, named ``fit/size/who``."""
    from megatron_gspo.config import ParallelConfig
    from megatron_gspo.mcore.process_groups import initialize

    groups = initialize(ParallelConfig(), seed=0)
    policies: dict[int, Any] = {}
    found = {}
    for fit, points in FITS.items():
        for point in points:
            if point.experts not in policies:
                policies[point.experts] = tiny_policy(f"{folder}/{point.experts}", ParallelConfig(), groups)
            policy = policies[point.experts]
            samples = make_samples(point.sequences, 8, point.response, policy.shape.vocab_size)
            steps = steps_of(policy, fixed_lengths(samples, point.response), point.max_tokens, peer=BARE)
            found |= {f"{fit}/{point.size}/{who}": step for who, step in steps.items()}
    return found


def speedup_row(dimension: str, size: int, cores: int, taken: Mapping[Any, Sequence[Seconds]]) -> Row:
    """Speedup over one process, against the cores that so many processes can use."""
    speedup = [one.wall / many.wall for one, many in zip(taken[1, "ours"], taken[size, "ours"], strict=True)]
    usable = float(min(size, cores))
    bare = Spread.of([one.wall / many.wall for one, many in zip(taken[1, BARE], taken[size, BARE], strict=True)])
    return Row(
        "scaling", f"speedup, {dimension} parallel, {size} processes", "cores they can use", "x", "higher",
        ratio=Spread.of([value / usable for value in speedup]), ours=Spread.of(speedup),
        peer=Spread.exactly(usable), note=f"{BARE}: {bare.median:.2f} x",
    )  # fmt: skip


def overhead_row(dimension: str, size: int, taken: Mapping[Any, Sequence[Seconds]]) -> Row:
    """Processor time of all processes against that of one."""
    ours, one = ([1e3 * turn.cpu for turn in taken[count, "ours"]] for count in (size, 1))
    bare = ratios([turn.cpu for turn in taken[size, BARE]], [turn.cpu for turn in taken[1, BARE]])
    return Row(
        "scaling", f"processor time, {dimension} parallel, {size} processes", "one process", "ms", "lower",
        ratio=ratios(ours, one), ours=Spread.of(ours), peer=Spread.of(one), note=f"{BARE}: {bare.median:.2f}",
    )  # fmt: skip


def process_rows(dimension: str, path: str, args: argparse.Namespace) -> list[Row]:
    """Rows of one dimension: for each number of processes ours against bare Megatron, speedup and processor time."""
    sizes = SIZES[:2] if args.quick else SIZES
    with ExitStack() as stack:
        worlds = {size: stack.enter_context(World(size, prepare_processes, path, dimension)) for size in sizes}
        for world in worlds.values():
            world.ready()
        contestants = {(size, who): (world, who) for size, world in worlds.items() for who in ("ours", BARE)}
        taken = in_turns(contestants, args.repeats, args.seconds)
    rows, cores = [], hardware()["cores"]
    for size in sizes[1:]:
        rows += [
            time_row("scaling", f"step, {dimension} parallel, {size} processes", taken[size, "ours"],
                     taken[size, BARE], peer_name=BARE),
            speedup_row(dimension, size, cores, taken), overhead_row(dimension, size, taken),
        ]  # fmt: skip
    return rows


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Slope of log(seconds) over log(sizes) by least squares, and the root mean square of what is left, as a share."""
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    left = [b - mean_y - slope * (a - mean_x) for a, b in zip(x, y, strict=True)]
    return slope, math.sqrt(sum(value * value for value in left) / len(left))


def linear_and_quadratic(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """``a`` and ``b``, neither below 0, of seconds = a size + b size^2 with the least squares of relative errors, and
    the root mean square of what is left, as a share."""
    columns = [[size / taken for size, taken in zip(sizes, seconds, strict=True)],
               [size * size / taken for size, taken in zip(sizes, seconds, strict=True)]]  # fmt: skip
    (xx, xy), (_, yy) = ([sum(map(operator.mul, one, other)) for other in columns] for one in columns)
    x, y = map(sum, columns)
    a, b = (x * yy - y * xy) / (xx * yy - xy * xy), (y * xx - x * xy) / (xx * yy - xy * xy)
    if a < 0 or b < 0:  # one of the two alone
        a, b = (0.0, y / yy) if a < 0 else (x / xx, 0.0)
    left = [a * one + b * other - 1 for one, other in zip(*columns, strict=True)]
    return a, b, math.sqrt(sum(value * value for value in left) / len(left))


def fit_row(fit: str, sizes: Sequence[int], taken: Mapping[Any, Sequence[Seconds]]) -> Row:
    """The exponent of ours and of bare Megatron, one fit a turn."""
    turns = range(len(taken[fit, sizes[0], "ours"]))
    fits = {
        who: [exponent(sizes, [taken[fit, size, who][turn].wall for size in sizes]) for turn in turns]
        for who in ("ours", BARE)
    }
    slopes = {who: [slope for slope, _ in found] for who, found in fits.items()}
    left = Spread.of([residual for _, residual in fits["ours"]]).median
    times = [1e3 * Spread.of([turn.wall for turn in taken[fit, size, "ours"]]).median for size in sizes]
    return Row(
        "scaling", f"exponent of {fit}", BARE, "", "lower",
        ratio=Spread.of([2 ** (a - b) for a, b in zip(slopes["ours"], slopes[BARE], strict=True)]),
        ours=Spread.of(slopes["ours"]), peer=Spread.of(slopes[BARE]),
        note=f"{sizes[0]} to {sizes[-1]}: {', '.join(map(number, times))} ms; residual {100 * left:.0f} %",
    )  # fmt: skip


def fit_rows(folder: str, args: argparse.Namespace) -> list[Row]:
    """One row a fit."""
    with World(1, prepare_fits, folder) as world:
        world.ready()
        keys = [(fit, point.size, who) for fit, points in FITS.items() for point in points for who in ("ours", BARE)]
        taken = in_turns({key: (world, "/".join(map(str, key))) for key in keys}, args.repeats, args.seconds)
    return [fit_row(fit, [point.size for point in points], taken) for fit, points in FITS.items()]


def measure(args: argparse.Namespace) -> list[Row]:
    """All rows."""
    from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

    args.repeats = min(args.repeats, 3) if args.quick else args.repeats
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(f"{folder}/wide", TinyModel(layers=8, heads=8, key_value_heads=8))
        for experts in {point.experts for points in FITS.values() for point in points}:
            write_tiny_model(f"{folder}/{experts}", TinyModel(experts=experts))
        rows = []
        for dimension in DIMENSIONS:
            say(f"scaling: {dimension} parallel")
            rows += process_rows(dimension, f"{folder}/wide", args)
        say("scaling: exponents")
        return rows + fit_rows(folder, args)


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 3}, seconds=20)


if __name__ == "__main__":
    main()
