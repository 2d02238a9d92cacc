"""Log-probabilities from hidden states: time and peak memory against two ways that frameworks use in plain torch.

*naive*: logits of all tokens at once, ``log_softmax``, gather. *checkpointed chunks*: the same on 256 tokens at a time,
each chunk recomputed in the backward. Memory is the peak above the inputs in units of one float32 [tokens, vocabulary]
tensor, counted by torch's own allocator over one call; gradients of the hidden states and of the weight are part of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.common import Row, Spread, interleave, save_rows, say, table, time_row

CHUNK = 256
Inputs = tuple[Tensor, Tensor, Tensor]  # hidden [T, h], weight [V, h], labels [T]
Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """[T] log-probs by a whole log_softmax in float32."""
    logits = (hidden @ weight.t()).float()
    return logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


def checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """[T] log-probs chunk by chunk; a chunk's logits live only while it is computed, forward or backward."""
    pairs = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    return torch.cat([checkpoint(naive, rows, weight, own, use_reentrant=False) for rows, own in pairs])


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """[T] log-probs of ``log_probs_from_hidden``."""
    from megatron_gspo.parallel.log_probs import log_probs_from_hidden

    return log_probs_from_hidden(hidden, weight, labels)[0]


METHODS: dict[str, Method] = {"ours": ours, "naive": naive, "checkpointed chunks": checkpointed}


def call(method: Method, inputs: Inputs, *, gradient: bool) -> Callable[[], None]:
    """One forward, and backward with ``gradient``, from fresh leaves."""

    def run() -> None:
        hidden, weight, labels = inputs
        if not gradient:
            with torch.no_grad():
                method(hidden, weight, labels)
        else:
            leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
            method(*leaves, labels).mean().backward()
        if hidden.is_cuda:
            torch.cuda.synchronize()

    return run


def peak_bytes(function: Callable[[], None], device: torch.device) -> int:
    """Most bytes alive at once that ``function`` allocated, from the allocator's own records."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def make_inputs(tokens: int, vocabulary: int, width: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device)
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.05).to(device)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator).to(device)


def memory_row(name: str, units: dict[str, float], peer: str, target: float) -> Row:
    """Peak memory; one measurement each, since it doesn't vary. The target is of ours, in units."""
    ratio, own, other = (Spread.of([value]) for value in (units["ours"] / units[peer], units["ours"], units[peer]))
    return Row("log_probs", name, peer, "units", "lower", ratio, own, other, target=target, absolute=True)


def measure_one(vocabulary: int, gradient: bool, args: argparse.Namespace, device: torch.device) -> list[Row]:
    """Rows of time and memory, against each peer."""
    inputs = make_inputs(args.tokens, vocabulary, args.width, device)
    calls = {name: call(method, inputs, gradient=gradient) for name, method in METHODS.items()}
    if not gradient:
        del calls["checkpointed chunks"]  # there is nothing to checkpoint
    kind = "forward and backward" if gradient else "no gradient"
    what = f"log-probs, {kind}, {args.tokens} tokens x {round(vocabulary / 1000)}k"
    say(what)
    with torch.no_grad():
        worst = (ours(*inputs) - naive(*inputs)).abs().max().item()
    if worst > 1e-4:
        raise ValueError(f"log-probs differ by {worst:.1e}: the methods don't compute the same")
    unit = 4 * args.tokens * vocabulary
    units = {name: peak_bytes(function, device) / unit for name, function in calls.items()}
    taken = interleave(calls, repeats=args.repeats, warmup=1, seconds=args.seconds)
    rows = []
    for peer in list(calls)[1:]:
        rows.append(time_row("log_probs", f"{what}: time", taken["ours"], taken[peer], peer_name=peer, target=1.0))
        rows.append(memory_row(f"{what}: peak", units, peer, 0.25 if gradient else 0.1))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16k words only, 3 repeats")
    parser.add_argument("--seconds", type=float, default=40, help="per comparison (default: %(default)s)")
    for name, default in {"tokens": 1024, "width": 128, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.repeats = min(args.repeats, 3) if args.quick else args.repeats
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabularies = (16_384,) if args.quick else (16_384, 151_936)
    rows = [row for size in vocabularies for kind in (True, False) for row in measure_one(size, kind, args, device)]
    print(table(rows))
    if args.json:
        save_rows(args.json, rows)


if __name__ == "__main__":
    main()
