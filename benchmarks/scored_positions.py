"""The log-prob head on the trained positions alone against the same head on all positions, where prompts are long.

A packed batch whose prompts have three quarters of the tokens. Both sides are `log_probs_from_hidden`, in the same run:
forward and backward as in training, and the forward alone as in the old policy's pass. Their log-probs and gradients
agree to 1e-5. The weight's gradient, of the size of the vocabulary for any number of positions, is part of both.
Width 256, where the statistics of the vocabulary count as much as the products.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.common import Row, interleave, run_from_command_line, say, time_row

TARGET = 0.35
EVERYWHERE = "the head on all positions"
SIZES = {"4k x 16k": (4096, 16_384), "1k x 152k": (1024, 151_936)}  # positions x words
WIDTH, LENGTH, PROMPT = 256, 512, 384  # of a sequence, in tokens
SAME = 1e-5  # relative to the largest entry


def packed_mask(positions: int) -> Tensor:
    """[positions]: 1 where the label belongs to the last quarter of its sequence."""
    place = torch.arange(positions) % LENGTH
    return ((place >= PROMPT - 1) & (place < LENGTH - 1)).float()


def contestants(positions: int, words: int, gradient: bool) -> dict[str, Callable[[], list[Tensor]]]:
    """Both sides; each returns the log-probs and, with ``gradient``, the gradients of hidden states and weight."""
    from megatron_gspo.parallel.log_probs import log_probs_from_hidden
    from megatron_gspo.parallel.scored_rows import ScoredRows

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, WIDTH, generator=generator).requires_grad_(gradient)
    weight = torch.randn(words, WIDTH, generator=generator).mul_(0.05).requires_grad_(gradient)
    labels, mask = torch.randint(words, (positions,), generator=generator), packed_mask(positions)

    def run(of_mask: bool) -> list[Tensor]:
        scored = ScoredRows.of(mask) if of_mask else None
        log_probs = log_probs_from_hidden(hidden, weight, labels, scored=scored)[0] * mask
        if not gradient:
            return [log_probs]
        return [log_probs.detach(), *torch.autograd.grad(log_probs.sum(), (hidden, weight))]

    return {"ours": partial(run, True), EVERYWHERE: partial(run, False)}


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Raises ``RuntimeError`` where a result differs."""
    for a, b in zip(found, expected, strict=True):
        error = float((a - b).abs().max() / b.abs().max())
        if not error <= SAME:
            raise RuntimeError(f"the results differ by {error:.0e} of the largest entry: not the same numbers")


def measure(args: argparse.Namespace) -> list[Row]:
    """A row for each size, with gradient and without."""
    torch.set_num_threads(1)
    rows, sizes = [], dict(list(SIZES.items())[:1]) if args.quick else SIZES
    for name, (positions, words) in sizes.items():
        for gradient in (True, False):
            say(f"log-prob head on a quarter of the positions: {name}")
            sides = contestants(positions, words, gradient)
            check_same(sides["ours"](), sides[EVERYWHERE]())
            taken = interleave(sides, repeats=args.repeats, warmup=1, seconds=args.seconds / (2 * len(sizes)))
            what = "gradient" if gradient else "no gradient"
            rows.append(time_row("scored_positions", f"75 % prompt tokens, {what}, {name}: time", taken["ours"],
                                 taken[EVERYWHERE], target=TARGET, peer_name=EVERYWHERE))  # fmt: skip
    return rows


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 10}, seconds=60)


if __name__ == "__main__":
    main()
