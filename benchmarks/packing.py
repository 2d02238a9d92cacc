"""Packing: padding, and the time that ranks wait for each other, over the response lengths of reinforcement learning.

Ours (``data/schedule.py``, packed micro-batches) against
- *sorted, padded*: sequences sorted by length, a micro-batch takes as many as fit padded to its longest;
- *fixed count, padded*: 4 sequences a micro-batch in the order of arrival, padded to its longest, without a limit;
- *verl*: its ``get_seqlen_balanced_partitions`` (Karmarkar-Karp), packed like ours (``peers/verl_partitions.py``).

At most 32,768 tokens a micro-batch. Every figure is a share of the tokens that are computed. *Rank imbalance*: the
heaviest rank over the mean. *Waiting*: the same micro-batch by micro-batch, which is what counts where ranks exchange
tokens in each (expert parallelism). Repeats are batches of other lengths. Lengths are prompts of 64 to 512 tokens and
responses of up to 16,384, where they are cut:
- *log-normal*, median 1,500, sigma 1.0: one mode with a heavy tail, answers to prompts of one kind; 1 % are cut;
- *geometric*, mean 2,000: the same chance to end at every token, no heavy tail;
- *bimodal*: a quarter is long (log-normal, median 10,000, sigma 0.6), the others short (1,200, 0.6); 5 % are cut,
  so the longest length is common.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.common import ROOT, Row, Seconds, Spread, run_from_command_line, say, time_row, timed, versions_in
from benchmarks.peers.environment import peers_python
from benchmarks.turns import Worker
from megatron_gspo.data.schedule import Schedule, padded_length, schedule

LIMIT, PROMPTS = 16_384, (64, 512)
MAX_TOKENS = 32_768  # of a micro-batch
FIXED = 4  # sequences of a micro-batch of a fixed count
SCHEDULED = 100_000  # sequences whose scheduling is timed
PADDING, IMBALANCE, MILLISECONDS = 1.0, 3.0, 1000.0  # targets
SMALL = 0.01  # per cent; shares below it count as it in ratios


@dataclass(frozen=True)
class Layout:
    """``sequences`` over ``ranks``. ``multiple``: of a sequence, 2 CP; ``total``: of a micro-batch, with sequence
    parallelism times TP."""

    name: str
    ranks: int
    sequences: int
    multiple: int = 1
    total: int = 1
    multiple_of: int = 1  # of the number of micro-batches: interleaved pipelines
    one_length: bool = False  # pipelines pad micro-batches to one length


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("512 on dp 8", 8, 512),
        Layout("512 on dp 8, CP 2, TP 4", 8, 512, multiple=4, total=16),
        Layout("4096 on dp 64, CP 4, TP 8", 64, 4096, multiple=8, total=64),
        Layout("512 on dp 8, PP 4", 8, 512, multiple_of=4, one_length=True),
    )
}
LARGE = LAYOUTS["4096 on dp 64, CP 4, TP 8"]
CASES = (
    *(("bimodal", layout) for layout in LAYOUTS.values()),
    ("log-normal", LARGE),
    ("geometric", LARGE),
)


def draw_lengths(kind: str, count: int, seed: int) -> list[int]:
    """Tokens of ``count`` sequences, prompt and response."""
    draw = np.random.default_rng(seed)
    if kind == "log-normal":
        responses = draw.lognormal(math.log(1_500), 1.0, count)
    elif kind == "geometric":
        responses = draw.geometric(1 / 2_000, count)
    else:
        long = draw.random(count) < 0.25
        responses = np.where(long, draw.lognormal(math.log(10_000), 0.6, count),
                             draw.lognormal(math.log(1_200), 0.6, count))  # fmt: skip
    prompts = draw.integers(PROMPTS[0], PROMPTS[1] + 1, count)
    return [int(n) for n in np.clip(responses.astype(int), 1, LIMIT) + prompts]


def budget(layout: Layout) -> int:
    return MAX_TOKENS - MAX_TOKENS % math.lcm(layout.multiple, layout.total)


def dealt(rows: list[list[int]], layout: Layout) -> Schedule:
    """Micro-batches to the ranks in turn, empty ones at the end."""
    count = padded_length(-(-len(rows) // layout.ranks), layout.multiple_of)
    rows = rows + [[] for _ in range(count * layout.ranks - len(rows))]
    return [rows[rank :: layout.ranks] for rank in range(layout.ranks)]


def sorted_padded(sizes: Sequence[int], layout: Layout) -> Schedule:
    """Longest first; a micro-batch takes sequences as long as all fit at the length of its first."""
    rows: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if not rows or (len(rows[-1]) + 1) * sizes[rows[-1][0]] > budget(layout):
            rows.append([])
        rows[-1].append(index)
    return dealt(rows, layout)


def fixed_count(sizes: Sequence[int], layout: Layout) -> Schedule:
    return dealt([list(range(i, min(i + FIXED, len(sizes)))) for i in range(0, len(sizes), FIXED)], layout)


def ours(sizes: Sequence[int], layout: Layout) -> Schedule:
    return schedule(sizes, num_ranks=layout.ranks, max_tokens=budget(layout), multiple_of=layout.multiple_of)


def shares(plan: Schedule, lengths: Sequence[int], layout: Layout, *, padded: bool) -> dict[str, float]:
    """Padding, rank imbalance and waiting in per cent of the tokens computed.

    ``padded``: each sequence of a micro-batch takes as much as its longest, as in [batch, length] tensors; else they
    lie end to end.
    """
    sizes = [padded_length(length, layout.multiple) for length in lengths]
    computed = np.zeros((len(plan), len(plan[0])))
    for rank, rows in enumerate(plan):
        for k, members in enumerate(rows):
            held = [sizes[i] for i in members]
            total = max(held, default=0) * len(held) if padded else sum(held)
            computed[rank, k] = padded_length(total, math.lcm(layout.multiple, layout.total))
    if layout.one_length:
        computed[:] = computed.max()
    total = float(computed.sum())
    return {
        "padding": 100 * (1 - sum(lengths) / total),
        "rank imbalance": 100 * (float(computed.sum(axis=1).max()) * len(plan) / total - 1),
        "waiting": 100 * (float(computed.max(axis=0).sum()) * len(plan) / total - 1),
    }


def share_row(name: str, ours: Sequence[float], peer: Sequence[float], **more: Any) -> Row:
    """Percentages of the batches, ours and a peer's."""
    ratio = [max(a, SMALL) / max(b, SMALL) for a, b in zip(ours, peer, strict=True)]
    return Row("packing", name, unit="%", better="lower", ratio=Spread.of(ratio), ours=Spread.of(ours),
               peer=Spread.of(peer), absolute=True, **more)  # fmt: skip


# The peers of each figure. verl packs too, so its padding differs from ours with pipelines only.
PEERS = {"padding": ("sorted, padded", "fixed count, padded", "verl"),
         "rank imbalance": ("sorted, padded", "fixed count, padded", "verl"), "waiting": ("verl",)}  # fmt: skip
TARGETS = {"padding": PADDING, "rank imbalance": IMBALANCE}


def case_rows(kind: str, layout: Layout, batches: Sequence[list[int]], plans: Sequence[Schedule]) -> list[Row]:
    """The rows of one distribution and layout; ``plans`` are verl's of the batches."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("ours", *PEERS["padding"])}
    for lengths, theirs in zip(batches, plans, strict=True):
        sizes = [padded_length(length, layout.multiple) for length in lengths]
        measure = partial(shares, lengths=lengths, layout=layout)
        found["ours"].append(measure(ours(sizes, layout), padded=False))
        found["verl"].append(measure(theirs, padded=False))
        found["sorted, padded"].append(measure(sorted_padded(sizes, layout), padded=True))
        found["fixed count, padded"].append(measure(fixed_count(sizes, layout), padded=True))
    rows = []
    for figure, peers in PEERS.items():
        if layout.one_length and figure != "padding":
            continue  # every micro-batch has one length: all is in the padding
        for peer in peers:
            if peer == "verl" and figure == "padding" and not layout.one_length:
                continue
            values = [[batch[figure] for batch in found[who]] for who in ("ours", peer)]
            rows.append(share_row(f"{figure}, {kind}, {layout.name}", *values, peer_name=peer,
                                  target=TARGETS.get(figure)))  # fmt: skip
    return rows


def take_times(function: Callable[[], Any], worker: Worker, repeats: int) -> tuple[list[Seconds], list[Seconds]]:
    """Of ours here and of the worker's segment, in turns of alternating order."""
    taken: tuple[list[Seconds], list[Seconds]] = ([], [])
    for turn in range(repeats):
        gc.collect()  # not within a measurement
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            taken[side].append(timed(function) if side == 0 else Seconds(**worker.segment()))
    return taken


def measure(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """The rows, and the peers' versions."""
    python = args.peers_python or peers_python()
    args.repeats = min(args.repeats, 3) if args.quick else args.repeats
    count = 10_000 if args.quick else SCHEDULED
    batches = [[draw_lengths(kind, layout.sequences, seed) for seed in range(args.repeats)] for kind, layout in CASES]
    sizes = [padded_length(n, LARGE.multiple) for n in draw_lengths("bimodal", count - count % LARGE.ranks, 0)]
    tasks = [task_of(lengths, layout) for (_, layout), drawn in zip(CASES, batches, strict=True) for lengths in drawn]
    say(f"packing: {len(CASES)} cases of {args.repeats} batches, scheduling {len(sizes):,} sequences")
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / file for file in ("tasks.json", "plans.json")]
        files[0].write_text(json.dumps([*tasks, task_of(sizes, LARGE)]))
        program = str(ROOT / "benchmarks" / "peers" / "verl_partitions.py")
        with Worker("verl", [python, program, *map(str, files)], limit=300) as worker:
            worker.report()
            times = take_times(lambda: ours(sizes, LARGE), worker, min(args.repeats, 5))
        plans = json.loads(files[1].read_text())
    rows = []
    for number, (kind, layout) in enumerate(CASES):
        rows += case_rows(kind, layout, batches[number], plans[number * args.repeats :][: args.repeats])
    rows.append(
        time_row(
            "packing", f"scheduling {len(sizes):,} sequences on dp 64", *times, peer_name="verl",
            target=MILLISECONDS, absolute=True, note="verl: the dealing to ranks and one rank's micro-batches",
        )
    )  # fmt: skip
    return rows, {"peer_versions": versions_in(python, ("verl",))}


def task_of(lengths: Sequence[int], layout: Layout) -> dict[str, Any]:
    sizes = [padded_length(length, layout.multiple) for length in lengths]
    return {"lengths": sizes, "ranks": layout.ranks, "max_tokens": budget(layout), "multiple_of": layout.multiple_of}


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 9}, seconds=60, peers=True)


if __name__ == "__main__":
    main()
