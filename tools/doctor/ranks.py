"""The ranks of a launch: they meet, compare config and versions, and make an all-reduce on each
process group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_gspo.config import ConfigError, ParallelConfig
from megatron_gspo.config.parallel_checks import check_layout
from megatron_gspo.errors import RunError, first_line
from megatron_gspo.mcore.process_groups import (
    compute_device,
    every_group,
    initialize,
    shutdown,
    start,
)
from megatron_gspo.tools.doctor.findings import Finding, describe_ranks, error, failed, ok

COUNT = 1 << 18  # float32 numbers of a message: 1 MiB
LOCAL_MINUTES = 10.0  # that a rank may take for what it checks alone, such as reading the prompts


@dataclass(frozen=True)
class Exchange:
    """An all-reduce on one group. seconds: of 1 MiB, after a first one that connects the ranks.
    wrong: numbers that are not the sum."""

    kind: str
    ranks: tuple[int, ...]
    seconds: float
    wrong: int
    backend: str


def meet(parallel: ParallelConfig, seconds: float) -> list[Finding]:
    """Start ``torch.distributed`` from the launcher's environment; an error finding where ranks
    are missing.
    """
    why = "a run would wait for them and then stop"
    try:
        start(backend=parallel.backend, timeout_minutes=seconds / 60)
        dist.barrier()
    except RunError as failure:
        return [failed("ranks.missing", failure, why)]
    except RuntimeError as failure:
        what = f"the ranks did not meet within {seconds:g} s: {first_line(failure)}"
        return [error("ranks.missing", what, why, "check their logs")]
    return [ok("ranks.all", f"all {dist.get_world_size()} ranks are present")]


def compare_ranks(versions: Mapping[str, str | None], config_digest: str) -> list[Finding]:
    """A collective: whether all ranks have rank 0's config and versions."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (config_digest, dict(versions)))
    return judge_ranks(gathered)


def judge_ranks(gathered: Sequence[tuple[str, Mapping[str, str | None]]]) -> list[Finding]:
    """gathered: each rank's digest of its config, and its versions."""
    findings = []
    first_digest, first_versions = gathered[0]
    differing = [rank for rank, (digest, _) in enumerate(gathered) if digest != first_digest]
    if differing:
        what = f"{describe_ranks(differing)} loaded no config, or another than rank 0"
        why = "the ranks would wait for each other in different process groups"
        findings.append(
            error("config.ranks", what, why, "give every rank the same file and overrides")
        )
    for package, version in first_versions.items():
        others = [
            rank for rank, (_, versions) in enumerate(gathered) if versions.get(package) != version
        ]
        if others:
            other = gathered[others[0]][1].get(package)
            shown = (
                f"{version or 'absent'} on rank 0, {other or 'absent'} on {describe_ranks(others)}"
            )
            what = f"{package} differs: {shown}"
            why = "ranks that compute differently diverge or hang"
            findings.append(
                error("ranks.versions", what, why, "install the same environment on all hosts")
            )
    return findings or [ok("ranks.versions", "the same versions on all ranks")]


def check_groups(parallel: ParallelConfig) -> list[Finding]:
    """A collective: an all-reduce on each of Megatron's groups, built as a run builds them."""
    try:
        check_layout(parallel, dist.get_world_size())
    except ConfigError:
        # Reported; the connections are still checked.
        parallel = replace(ParallelConfig(), backend=parallel.backend)
    initialize(parallel, seed=0)
    try:
        exchanges = [exchange(kind, group) for kind, group in every_group().items()]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, exchanges)
    finally:
        shutdown(keep_distributed=True)
    return judge_groups([each for exchanges in gathered for each in exchanges])


def exchange(kind: str, group: dist.ProcessGroup) -> Exchange:
    """Sum 1 MiB of integers over this rank's group; the sum over 4,096 ranks is still exact."""
    ranks = tuple(dist.get_process_group_ranks(group))
    backend = dist.get_backend(group)
    device = compute_device() if backend == "nccl" else torch.device("cpu")
    numbers = torch.arange(COUNT, device=device) % 8 + 1
    seconds = 0.0
    total = numbers.float()
    for _ in range(2):
        total = (numbers * (dist.get_rank() % 128 + 1)).float()
        begin = time.perf_counter()
        dist.all_reduce(total, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    expected = numbers.float() * sum(rank % 128 + 1 for rank in ranks)
    return Exchange(kind, ranks, seconds, int((total != expected).sum()), backend)


def judge_groups(exchanges: Sequence[Exchange]) -> list[Finding]:
    """A line for each kind of group, with the time of the slowest."""
    findings = []
    for kind in dict.fromkeys(each.kind for each in exchanges):
        of_kind = [each for each in exchanges if each.kind == kind]
        wrong = [each for each in of_kind if each.wrong]
        for each in wrong[:3]:
            what = (
                f"{kind} group of {describe_ranks(each.ranks)}: {each.wrong:,} of {COUNT:,} sums"
                " are wrong"
            )
            fix = (
                "test these nodes' memory, GPUs and network cards, and leave the broken one out of"
                " the run"
            )
            findings.append(error(f"groups.{kind}", what, "training would be silently wrong", fix))
        size = len(of_kind[0].ranks)
        groups = len({each.ranks for each in of_kind})
        if not wrong and size > 1:
            slowest = max(of_kind, key=lambda each: each.seconds)
            what = (
                f"{kind}: {groups} group{'s' if groups > 1 else ''} of {size} over"
                f" {slowest.backend}, exact; "
            )
            what += f"1 MiB takes {1000 * slowest.seconds:.2f} ms"
            what += f" in that of {describe_ranks(slowest.ranks)}" if groups > 1 else ""
            findings.append(ok(f"groups.{kind}", what))
    return findings


def gather_findings(findings: Sequence[Finding]) -> dict[int, Sequence[Finding]]:
    """A collective: the findings of all ranks, by rank; waits for what a rank checks alone."""
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=LOCAL_MINUTES))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(findings), group=group)
    return dict(enumerate(gathered))
