"""One rank of `log_probs.py`: runs in the peers' environment, where ours needs torch alone.

    python benchmarks/log_prob_worker.py CASES.json --rank 0 --ranks 2 --meet FILE

For every case: each contestant once for its result, its difference from ours and its peak memory,
then all in turns. In a tensor-parallel group all ranks start together and a turn lasts until the
last is done. Rank 0 prints a line `@@ JSON` for each case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.common import by_turns, say
from benchmarks.peers.log_probs import PEERS, Function, Peer, Result


@dataclass(frozen=True)
class Case:
    """Sizes of the whole; ``peers``: the names of those that are compared. logit_bytes: our budget
    for logits; None is the default of a CPU, 32 MiB.
    """

    tokens: int
    vocabulary: int
    width: int
    dtype: str = "float32"
    tensor_parallel: int = 1
    entropy: bool = True
    gradient: bool = True
    peers: tuple[str, ...] = ()
    logit_bytes: int | None = None
    repeats: int = 3
    seconds: float = 30.0

    def runs(self, peer: Peer) -> bool:
        """Whether the peer can compute this case and is selected for it."""
        fits = peer.parallel or self.tensor_parallel == 1
        return fits and (peer.entropy or not self.entropy) and peer.name in self.peers


# Hidden [T, h], this rank's rows of the weight [V / tp, h], labels [T].
Inputs = tuple[Tensor, Tensor, Tensor]
# Log-probs, entropy, gradients of hidden and of the weight, as far as the case has them.
Outputs = list[Tensor]


def make_inputs(case: Case, rank: int) -> Inputs:
    """Logits of standard deviation 0.05 sqrt(h), at hidden 2048 2.3: a model that is unsure but
    has favourites.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    hidden = torch.randn(case.tokens, case.width, generator=generator).to(dtype)
    weight = torch.randn(case.vocabulary, case.width, generator=generator).mul_(0.05).to(dtype)
    labels = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    return hidden, weight.chunk(case.tensor_parallel)[rank].clone(), labels


def ours(group: ProcessGroup | None, logit_bytes: int | None) -> Function:
    from megatron_gspo.parallel.log_probs import LogProbOptions, log_probs_from_hidden

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> Result:
        options = LogProbOptions(with_entropy=entropy, chunk_bytes=logit_bytes)
        return log_probs_from_hidden(hidden, weight, labels, options, tp_group=group)

    return run


def call(function: Function, inputs: Inputs, case: Case) -> Outputs:
    """Forward; with ``gradient`` also the backward of mean log-prob and a tenth of the mean
    entropy, from fresh leaves.
    """
    hidden, weight, labels = inputs
    if not case.gradient:
        with torch.no_grad():
            log_probs, entropy = function(hidden, weight, labels, case.entropy)
        return [log_probs, *([entropy] if case.entropy and entropy is not None else [])]
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    log_probs, entropy = function(*leaves, labels, case.entropy)
    loss = log_probs.float().mean()
    if case.entropy and entropy is not None:
        loss = loss + 0.1 * entropy.float().mean()
    loss.backward()
    values = [
        log_probs.detach(),
        *([entropy.detach()] if case.entropy and entropy is not None else []),
    ]
    return [*values, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def difference(outputs: Outputs, expected: Outputs) -> float:
    """The largest over results and gradients, relative to the largest entry of each. What is
    bfloat16 here may differ by a rounding of 2^-8, which counts as 1e-5; log-probs are compared in
    float32 for every peer.
    """
    allowed = {torch.bfloat16: 1e-5 * 2**8}
    return max(
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        * allowed.get(b.dtype, 1.0)
        for a, b in zip(outputs, expected, strict=True)
    )


def peak_bytes(function: Callable[[], Any], device: str) -> tuple[int, Any]:
    """Most bytes alive at once that ``function`` allocated, from the allocator's own records,
    and what it returned.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        returned = function()
        return torch.cuda.max_memory_allocated() - before, returned
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        returned = function()
    events = record.profiler.kineto_results.events()
    alive = 0
    peak = 0
    for _, change in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        alive += change
        peak = max(peak, alive)
    return peak, returned


@dataclass
class Seat:
    """This process in its group: ``group`` is None where it is alone."""

    rank: int
    group: ProcessGroup | None

    def together(self, value: float, how: Any) -> float:
        """Of all ranks, by ``dist.ReduceOp``."""
        if self.group is None:
            return value
        whole = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(whole, op=how, group=self.group)
        return float(whole)

    def timed(self, function: Callable[[], Any]) -> list[float]:
        """Seconds until the last rank is done, CPU seconds of all."""
        if self.group is not None:
            dist.barrier(group=self.group)
        wall = time.perf_counter()
        cpu = time.process_time()
        function()
        cpu = time.process_time() - cpu
        if self.group is not None:
            dist.barrier(group=self.group)
        return [time.perf_counter() - wall, self.together(cpu, dist.ReduceOp.SUM)]


def once(
    function: Function, inputs: Inputs, case: Case, expected: Outputs | None, seat: Seat, warm: bool
) -> Any:
    """One contestant's peak in units of a rank's float32 [T, V / tp], with and without the
    gradients it leaves, and its difference from ours; with ``warm`` a call before that compiles it.
    Gives the outputs too."""
    if warm:
        call(function, inputs, case)
    unit = 4 * case.tokens * case.vocabulary // case.tensor_parallel
    peak, outputs = peak_bytes(lambda: call(function, inputs, case), "cpu")
    gradients = sum(tensor.nbytes for tensor in outputs[-2:]) if case.gradient else 0
    apart = 0.0 if expected is None else difference(outputs, expected)
    maximum = dist.ReduceOp.MAX
    return outputs, {
        "peak": seat.together(peak / unit, maximum),
        "beyond_gradients": seat.together((peak - gradients) / unit, maximum),
        "difference": seat.together(apart, maximum),
    }


def run_case(case: Case, seat: Seat) -> dict[str, Any]:
    """``once`` and ``turns`` of each contestant, ``failed`` with reasons; the same peers fail
    on every rank.
    """
    inputs = make_inputs(case, seat.rank)
    functions = {"ours": ours(seat.group, case.logit_bytes)}
    expected, first = once(functions["ours"], inputs, case, None, seat, warm=False)
    report: dict[str, Any] = {"case": asdict(case), "once": {"ours": first}, "failed": {}}
    for peer in PEERS:
        if not case.runs(peer):
            continue
        try:
            functions[peer.name] = peer.load(seat.group)
            _, report["once"][peer.name] = once(
                functions[peer.name], inputs, case, expected, seat, peer.compiles
            )
        except Exception as error:  # a peer may fail in any way; it is reported, and the others run
            functions.pop(peer.name, None)
            report["failed"][peer.name] = f"{type(error).__name__}: {error}".split("\n")[0]
    del expected
    measures = {
        name: partial(seat.timed, partial(call, function, inputs, case))
        for name, function in functions.items()
    }
    turns = by_turns(
        measures,
        repeats=case.repeats,
        seconds=case.seconds,
        agree=lambda late: bool(seat.together(float(late), dist.ReduceOp.MAX)),
    )
    return report | {"turns": turns}


def take_seat(rank: int, ranks: int, meet: str) -> Seat:
    """Join the group; Megatron's parallel state too, which its functions and verl's read."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=ranks,
    )
    try:
        from megatron.core import parallel_state
    except ImportError:
        say("megatron-core is absent: its functions and verl's will be missing")
    else:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    return Seat(rank, dist.group.WORLD if ranks > 1 else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "cases", type=Path, help="JSON list of cases, all of the same tensor-parallel size"
    )
    for name in ("rank", "ranks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument(
        "--meet", required=True, help="a file that doesn't exist: where the ranks find each other"
    )
    args = parser.parse_args()
    cases = [Case(**case) for case in json.loads(args.cases.read_text())]
    seat = take_seat(args.rank, args.ranks, args.meet)
    for case in cases:
        report = run_case(case, seat)
        if seat.rank == 0:
            print("@@ " + json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
