"""Ours, TRL's and verl's policy loss in turns, for `policy_loss.py`; runs in the peers' environment.

    python benchmarks/policy_loss_worker.py MODEL --sizes 8x128 512x2048 --repeats 5

Prints a line `@@ JSON` for each size: `difference` of each peer's loss and gradient from ours, relative to the largest
entry, and `turns` of [wall, CPU] seconds of a forward and backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.common import interleave
from benchmarks.peers.policy_losses import CLIP, Loss, Prepare, trl_loss, verl_loss
from megatron_gspo.algorithms import LossExtras, policy_loss, preset


def ours() -> Prepare:
    """On the same numbers, packed: every response has the full length."""
    objective = preset("gspo", epsilon_low=CLIP[0], epsilon_high=CLIP[1])

    def prepare(old: Tensor, mask: Tensor, advantages: Tensor) -> Loss:
        count, width = mask.shape
        packed: dict[str, Tensor] = {
            "old_log_probs": old.flatten(), "loss_mask": mask.flatten(),
            "advantages": advantages.repeat_interleave(width),
            "segment_ids": torch.arange(count).repeat_interleave(width),
        }  # fmt: skip
        return lambda log_probs: policy_loss(
            objective, log_probs=log_probs.flatten(), **packed, num_sequences=count, num_tokens=count * width,
            extras=LossExtras(num_segments=count),
        )[0]  # fmt: skip

    return prepare


def make_batch(count: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-probs, old log-probs, mask [count, width] and advantages [count]; about half of the sequences are clipped."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(count, width, generator=generator) * 3
    drift = 5e-4 * torch.randn(count, 1, generator=generator) + 5e-4 * torch.randn(count, width, generator=generator)
    return old + drift, old, torch.ones(count, width), torch.randn(count, generator=generator)


def measure(prepare: dict[str, Prepare], count: int, width: int, repeats: int) -> dict[str, object]:
    log_probs, *rest = make_batch(count, width)
    losses = {name: of_batch(*rest) for name, of_batch in prepare.items()}
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            leaf = log_probs.clone().requires_grad_()
            loss = losses[name](leaf)
            loss.backward()
            assert leaf.grad is not None
            found[name] = loss.detach(), leaf.grad

        return run

    turns = interleave({name: call(name) for name in losses}, repeats=repeats, warmup=1, seconds=15)
    differences = {
        name: max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[name], found["ours"], strict=True))
        for name in losses
    }
    taken = {name: [[turn.wall, turn.cpu] for turn in runs] for name, runs in turns.items()}
    return {"tokens": count * width, "sequences": count, "difference": differences, "turns": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="a Hugging Face directory: TRL's trainer needs a model")
    parser.add_argument("--sizes", nargs="+", required=True, help="SEQUENCESxTOKENS")
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    prepare = {"ours": ours(), "verl": verl_loss(), "TRL": trl_loss(args.model)}
    for size in args.sizes:
        count, width = map(int, size.split("x"))
        print("@@ " + json.dumps(measure(prepare, count, width, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
