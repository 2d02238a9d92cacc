"""What each rank says of itself, and what is wrong when all are put side by side. Plain data and pure functions."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_gspo.tools.doctor.diagnostics import Finding, describe_ranks, error, note, ok, warning

_SKEW_WARNING = 1.0  # seconds: files and logs of the nodes are out of order
_SKEW_ERROR = 10.0  # torchrun's c10d rendezvous takes a node for dead whose heartbeat looks 15 s old
_SAME = ("python", "torch", "megatron-core", "transformers", "transformer-engine", "apex", "megatron_gspo")


@dataclass(frozen=True)
class RankFacts:
    """Of one rank. host: tells machines apart, whatever they are called. addresses: that the host's name stands for, ()
    where it stands for none. gpu: identity of its GPU, "" without. gpus: how many it sees. interface: that gloo is told
    to use, "" where it finds one by the host's name."""

    rank: int
    local_rank: int
    host: str
    hostname: str
    addresses: tuple[str, ...] = ()
    gpu: str = ""
    gpus: int = 0
    interface: str = ""
    versions: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankFacts:
        return cls(
            **{
                **data,
                "addresses": tuple(data["addresses"]),
                "versions": tuple((name, version) for name, version in data["versions"]),
            }
        )


def facts_of_this_rank(rank: int, local_rank: int, versions: Mapping[str, str | None]) -> RankFacts:
    import torch

    hostname = socket.gethostname()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = gpus and local_rank < gpus
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        host=f"{hostname} {_read('/proc/sys/kernel/random/boot_id')} {_network_namespace()}",
        hostname=hostname,
        addresses=_addresses(hostname),
        gpu=str(getattr(torch.cuda.get_device_properties(local_rank), "uuid", local_rank)) if own else "",
        gpus=gpus,
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        versions=tuple((name, version or "absent") for name, version in versions.items()),
    )


def judge_ranks(facts: Sequence[RankFacts], offsets: Mapping[int, float]) -> list[Finding]:
    """offsets: seconds that each rank's clock is ahead of the first one's, as measured."""
    hosts: dict[str, list[RankFacts]] = {}
    for fact in facts:
        hosts.setdefault(fact.host, []).append(fact)
    found = [
        ok(
            "ranks.all",
            f"all {len(facts)} ranks are here, on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: "
            + _show_hosts(hosts),
        )
    ]
    found += _judge_numbers(hosts) + _judge_gpus(facts) + _judge_names(hosts)
    found += judge_clocks({fact.rank: offsets[fact.rank] for fact in facts if fact.rank in offsets}, len(hosts))
    return found + _judge_versions(facts)


def judge_missing(here: Sequence[int], world_size: int, seconds: float) -> list[Finding]:
    """Ranks that did not come within so many seconds."""
    missing = [rank for rank in range(world_size) if rank not in set(here)]
    if not missing:
        return []
    return [
        error(
            "ranks.missing",
            f"{describe_ranks(missing)} of {world_size} did not arrive within {seconds:g} s",
            "a run would wait for them and then stop",
            "look at their logs; start as many processes as WORLD_SIZE "
            "says, with one MASTER_ADDR and MASTER_PORT that all of them reach",
        )
    ]


def judge_clocks(offsets: Mapping[int, float], hosts: int) -> list[Finding]:
    """The spread of the ranks' clocks, in seconds."""
    if not offsets:
        return []
    early, late = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    spread = offsets[late] - offsets[early]
    text = f"clocks agree within {max(1.0, 1000 * spread):.0f} ms"
    if spread < _SKEW_WARNING:
        return [ok("ranks.clocks", text)]
    text = f"the clocks of rank {early} and rank {late} are {spread:.1f} s apart"
    if spread < _SKEW_ERROR:
        return [
            warning(
                "ranks.clocks",
                text,
                "logs, file times and metrics of the nodes don't fit together",
                "run chrony or ntpd on every node",
            )
        ]
    return [
        error(
            "ranks.clocks",
            text,
            "torchrun's rendezvous takes a node for dead whose heartbeat looks 15 s old",
            "run chrony or ntpd on every node",
        )
    ]


def judge_configs(apart: Sequence[int], speaker: int) -> list[Finding]:
    """apart: ranks that have another config than the one that speaks."""
    if not apart:
        return []
    return [
        error(
            "config.ranks",
            f"{describe_ranks(apart)} read another config than rank {speaker}, or none",
            "they would wait for each other in different groups",
            "give every rank the same file and overrides",
        )
    ]


def judge_shared(places: Mapping[int, tuple[str, int]], hosts: Mapping[int, str]) -> list[Finding]:
    """Whether run_dir is one directory on all hosts. places: by rank, the deepest part of it that exists and its inode,
    which all clients of a network file system see alike; hosts: by rank, as in `RankFacts.host`."""
    first = min(places, default=0)
    different = [rank for rank in places if hosts[rank] != hosts[first] and places[rank] != places[first]]
    if not different:
        return []
    return [
        warning(
            "ranks.run_dir",
            f"{places[different[0]][0]} on {hosts[different[0]].split()[0]} ({describe_ranks(different)}) is another "
            f"directory than {places[first][0]} on {hosts[first].split()[0]}",
            "a checkpoint is written by all hosts, and a part of it would be missing on each",
            "put run_dir on a file system that all hosts see under one path",
        )
    ]


def _judge_numbers(hosts: Mapping[str, list[RankFacts]]) -> list[Finding]:
    counts = {members[0].hostname: len(members) for members in hosts.values()}
    if len(set(len(members) for members in hosts.values())) > 1:
        shown = ", ".join(f"{count} on {name}" for name, count in counts.items())
        return [
            warning(
                "ranks.per_host",
                f"the hosts have different numbers of ranks: {shown}",
                "TP and EP groups then cross hosts, where they are slow",
                "start the same number on every host",
            )
        ]
    return []


def _judge_gpus(facts: Sequence[RankFacts]) -> list[Finding]:
    with_gpu = [fact for fact in facts if fact.gpus]
    if not with_gpu:
        return []
    found = []
    if without := [fact.rank for fact in facts if not fact.gpus]:
        found.append(
            error(
                "ranks.gpus",
                f"{describe_ranks(without)} see{'s' if len(without) == 1 else ''} no GPU, others do",
                "they can't be in one group",
                "look at nvidia-smi and CUDA_VISIBLE_DEVICES there",
            )
        )
    if beyond := [fact for fact in with_gpu if fact.local_rank >= fact.gpus]:
        found.append(
            error(
                "ranks.gpus",
                f"{describe_ranks([fact.rank for fact in beyond])}: local rank "
                f"{beyond[0].local_rank} and only {beyond[0].gpus} GPUs",
                "a rank needs a GPU of its own",
                "lower --nproc-per-node or show more GPUs in CUDA_VISIBLE_DEVICES",
            )
        )
    users = Counter((fact.host, fact.gpu) for fact in with_gpu if fact.gpu)
    for (host, gpu), count in users.items():
        if count > 1:
            ranks = [fact.rank for fact in with_gpu if (fact.host, fact.gpu) == (host, gpu)]
            found.append(
                error(
                    "ranks.gpus",
                    f"{describe_ranks(ranks)} use the same GPU {gpu} of {host.split()[0]}",
                    "NCCL refuses it, and memory is shared",
                    "set CUDA_VISIBLE_DEVICES alike for all ranks of a host, and LOCAL_RANK to 0, 1, ...",
                )
            )
    return found or [ok("ranks.gpus", f"{len(with_gpu)} ranks, each with a GPU of its own")]


def _judge_names(hosts: Mapping[str, list[RankFacts]]) -> list[Finding]:
    """gloo, over which Megatron makes groups even beside NCCL, tells the other ranks the address of the host's name."""
    found = []
    several = len(hosts) > 1
    for members in hosts.values():
        fact = members[0]
        loopback = bool(fact.addresses) and all(_is_loopback(address) for address in fact.addresses)
        if fact.interface or (fact.addresses and not loopback):
            continue
        problem = (
            f"{fact.hostname} resolves to {', '.join(fact.addresses)}"
            if fact.addresses
            else f"the name {fact.hostname} resolves to no address"
        )
        if several:
            found.append(
                error(
                    "ranks.hostnames",
                    problem,
                    "other hosts would look for its ranks at themselves",
                    "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network's interface, or correct /etc/hosts",
                )
            )
        else:
            found.append(
                note(
                    "ranks.hostnames",
                    problem,
                    "fine on one host; with several, others could not reach it",
                    "set GLOO_SOCKET_IFNAME there, or correct /etc/hosts",
                )
            )
    names = Counter(members[0].hostname for members in hosts.values())
    for name, count in names.items():
        if count > 1:
            found.append(
                warning(
                    "ranks.hostnames",
                    f"{count} hosts are called {name}",
                    "their logs and files can't be told apart, and names resolve to one of them",
                    "give every host a name of its own",
                )
            )
    return found or [ok("ranks.hostnames", "the hosts' names resolve to addresses that others reach")]


def _judge_versions(facts: Sequence[RankFacts]) -> list[Finding]:
    found = []
    for package in _SAME:
        versions: dict[str, list[int]] = {}
        for fact in facts:
            versions.setdefault(dict(fact.versions).get(package, "absent"), []).append(fact.rank)
        if len(versions) > 1:
            shown = ", ".join(f"{version} on {describe_ranks(ranks)}" for version, ranks in versions.items())
            found.append(
                error(
                    "ranks.versions",
                    f"{package} differs: {shown}",
                    "ranks that compute differently drift apart or hang",
                    "install the same environment everywhere",
                )
            )
    return found or [ok("ranks.versions", "the same versions everywhere")]


def _show_hosts(hosts: Mapping[str, list[RankFacts]]) -> str:
    shown = [f"{members[0].hostname} {describe_ranks([fact.rank for fact in members])}" for members in hosts.values()]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _addresses(hostname: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None)}))
    except OSError:
        return ()


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
        return file.read().strip()
    return ""


def _network_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""
