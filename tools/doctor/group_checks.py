"""A small all-reduce and all-to-all on every parallel group: exact results, and how long they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.tools.doctor.diagnostics import Finding, describe_ranks, error, ok, warning

_COUNT = 1 << 18  # float32 numbers of a message: 1 MiB
_ROUNDS = 3
_SLOW = 5.0  # times the median of the groups of one kind
_UNEVEN = 3  # parts of an all-to-all have one of so many lengths


@dataclass(frozen=True)
class Measure:
    """Of one group, measured by one of its ranks. kind: tp, ep, ...; all_reduce, all_to_all: seconds for 1 MiB; wrong:
    what didn't come out as it must, "" where all did."""

    kind: str
    ranks: tuple[int, ...]
    rank: int
    all_reduce: float
    all_to_all: float
    wrong: str = ""
    backend: str = "gloo"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measure:
        return cls(**{**data, "ranks": tuple(data["ranks"])})


def pattern(rank: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """What a rank puts into an all-reduce, [count] float32: integers whose sum over 4,096 ranks is still exact."""
    return ((torch.arange(count, device=device) % 8 + 1) * (rank % 128 + 1)).float()


def expected_sum(ranks: Sequence[int], count: int, device: torch.device | str = "cpu") -> Tensor:
    """The sum of `pattern` over ranks, [count] float32."""
    return (torch.arange(count, device=device) % 8 + 1).float() * sum(rank % 128 + 1 for rank in ranks)


def part_lengths(place: int, size: int, count: int) -> list[int]:
    """How many numbers the rank at `place` sends to each of `size`: unequal, as tokens to experts are. Symmetric, so it
    gets as many from each."""
    return [max(1, count // size) + (place + other) % _UNEVEN for other in range(size)]


def measure_group(
    kind: str,
    group: dist.ProcessGroup,
    *,
    device: torch.device | str = "cpu",
    all_reduce: Callable[..., Any] = dist.all_reduce,
    all_to_all: Callable[..., Any] = dist.all_to_all_single,
) -> Measure:
    """Run both on this rank's group. The collectives are arguments, so that a broken one can be shown to be found."""
    ranks = tuple(dist.get_process_group_ranks(group))
    rank, place, size = dist.get_rank(), dist.get_rank(group), len(ranks)
    own, total = pattern(rank, _COUNT, device), torch.empty(_COUNT, device=device)
    lengths = part_lengths(place, size, _COUNT)
    sent = torch.repeat_interleave(
        torch.arange(size, device=device) + place * size, torch.tensor(lengths, device=device)
    )
    sent = sent.float()
    got = torch.full_like(sent, -1.0)

    def reduce_once() -> None:
        total.copy_(own)
        all_reduce(total, group=group)

    def exchange_once() -> None:
        all_to_all(got, sent, lengths, lengths, group=group)

    seconds = [_time(action, device) for action in (reduce_once, exchange_once)]
    wrong = _difference("all-reduce", total, expected_sum(ranks, _COUNT, device))
    came = torch.repeat_interleave(
        torch.arange(size, device=device) * size + place, torch.tensor(lengths, device=device)
    )
    wrong = wrong or _difference("all-to-all", got, came.float())
    return Measure(kind, ranks, rank, seconds[0], seconds[1], wrong, dist.get_backend(group))


def judge_groups(measures: Sequence[Measure]) -> list[Finding]:
    """A line for each kind of group, with the times of the slowest. Slow groups among several are reported where NCCL
    connects them: times of processes on shared cores do not measure a network."""
    found: list[Finding] = []
    alone = [
        kind
        for kind in dict.fromkeys(m.kind for m in measures)
        if all(len(m.ranks) == 1 for m in measures if m.kind == kind)
    ]
    if alone:
        found.append(ok("groups.single", f"{', '.join(alone)}: one rank each, nothing to exchange"))
    for kind in dict.fromkeys(measure.kind for measure in measures if measure.kind not in alone):
        mine = [measure for measure in measures if measure.kind == kind]
        groups: dict[tuple[int, ...], list[Measure]] = {}
        for measure in mine:
            groups.setdefault(measure.ranks, []).append(measure)
        wrong = [measure for measure in mine if measure.wrong]
        for measure in wrong[:3]:
            found.append(
                error(
                    f"groups.{kind}",
                    f"{kind} group of {describe_ranks(measure.ranks)}: {measure.wrong} on rank {measure.rank}",
                    "training would be silently wrong",
                    "test that node's memory, GPU and network card, and leave it out of the run",
                )
            )
        if not wrong:
            found.append(ok(f"groups.{kind}", _describe(kind, groups)))
        if mine[0].backend == "nccl":
            found += slow_groups(kind, {ranks: max(m.all_reduce for m in seen) for ranks, seen in groups.items()})
    return found


def slow_groups(kind: str, seconds: Mapping[tuple[int, ...], float]) -> list[Finding]:
    """Groups of one kind whose all-reduce takes many times the median of all."""
    usual = statistics.median(seconds.values())
    return [
        warning(
            f"groups.{kind}",
            f"the {kind} group of {describe_ranks(ranks)} takes {1000 * time:.2f} ms for 1 MiB, usual is "
            f"{1000 * usual:.2f} ms",
            "the whole run waits for it in every layer or step",
            "look at these nodes' links, NCCL_DEBUG=INFO shows the transport",
        )
        for ranks, time in seconds.items()
        if len(seconds) > 2 and time > _SLOW * usual
    ]


def _describe(kind: str, groups: Mapping[tuple[int, ...], list[Measure]]) -> str:
    seen = [measure for each in groups.values() for measure in each]
    reduce, exchange = max(measure.all_reduce for measure in seen), max(measure.all_to_all for measure in seen)
    return (
        f"{kind}: {len(groups)} group{'s' if len(groups) > 1 else ''} of {len(seen[0].ranks)} over {seen[0].backend}, "
        f"exact; 1 MiB takes {1000 * reduce:.2f} ms (all-reduce), {1000 * exchange:.2f} ms (all-to-all)"
    )


def _difference(what: str, got: Tensor, expected: Tensor) -> str:
    wrong = got != expected
    if not bool(wrong.any()):
        return ""
    place = int(wrong.nonzero()[0])
    return (
        f"{what} gave {got[place].item():g} at {place}, {expected[place].item():g} is right ({int(wrong.sum())} wrong)"
    )


def _time(action: Callable[[], None], device: torch.device | str) -> float:
    """Median seconds of some calls after a first one, which connects the ranks."""
    action()
    seconds = []
    for _ in range(_ROUNDS):
        _wait(device)
        begin = time.perf_counter()
        action()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _wait(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
