"""What each rank reports about itself, and the findings of comparing all ranks. Plain data and pure functions."""

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

_SKEW_WARNING = 1.0  # seconds: timestamps of logs and files of the nodes are out of order
_SKEW_ERROR = 10.0  # torchrun's c10d rendezvous drops a node whose heartbeat looks 15 s old
_SAME = ("python", "torch", "megatron-core", "transformers", "transformer-engine", "apex", "megatron_gspo")


@dataclass(frozen=True)
class RankInfo:
    """One rank, its host and its versions.

    host: identifies the machine, not its name. addresses: to which the host's name resolves, () if to none. gpu:
    identity of its GPU, "" without one. gpus: number of visible GPUs. interface: GLOO_SOCKET_IFNAME, "" if gloo takes
    the address of the host's name. versions: (package, version) of each package that must be the same on all ranks.
    """

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
    def from_dict(cls, data: Mapping[str, Any]) -> RankInfo:
        return cls(
            **{
                **data,
                "addresses": tuple(data["addresses"]),
                "versions": tuple((name, version) for name, version in data["versions"]),
            }
        )


def local_rank_info(rank: int, local_rank: int, versions: Mapping[str, str | None]) -> RankInfo:
    """The info of this process. versions: None for a package that is not installed."""
    import torch

    hostname = socket.gethostname()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = gpus and local_rank < gpus
    return RankInfo(
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


def judge_ranks(infos: Sequence[RankInfo], offsets: Mapping[int, float]) -> list[Finding]:
    """Findings about the ranks that are present. offsets: seconds by which each rank's clock is ahead of the reporting
    rank's."""
    hosts: dict[str, list[RankInfo]] = {}
    for info in infos:
        hosts.setdefault(info.host, []).append(info)
    found = [
        ok(
            "ranks.all",
            f"all {len(infos)} ranks are present, on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: "
            + _show_hosts(hosts),
        )
    ]
    found += _judge_numbers(hosts) + _judge_gpus(infos) + _judge_names(hosts)
    found += judge_clocks({info.rank: offsets[info.rank] for info in infos if info.rank in offsets}, len(hosts))
    return found + _judge_versions(infos)


def judge_missing(present: Sequence[int], world_size: int, seconds: float) -> list[Finding]:
    """Ranks that did not arrive within ``seconds``."""
    missing = [rank for rank in range(world_size) if rank not in set(present)]
    if not missing:
        return []
    return [
        error(
            "ranks.missing",
            f"{describe_ranks(missing)} of {world_size} did not arrive within {seconds:g} s",
            "a run would wait for them and then stop",
            "check their logs; start WORLD_SIZE processes, with one MASTER_ADDR and MASTER_PORT that all of them reach",
        )
    ]


def judge_clocks(offsets: Mapping[int, float], hosts: int) -> list[Finding]:
    """The largest difference between the ranks' clocks. offsets, in seconds: see ``judge_ranks``."""
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
                "logs, file times and metrics of the nodes are out of order",
                "run chrony or ntpd on every node",
            )
        ]
    return [
        error(
            "ranks.clocks",
            text,
            "torchrun's rendezvous drops a node whose heartbeat looks 15 s old",
            "run chrony or ntpd on every node",
        )
    ]


def judge_configs(differing: Sequence[int], reporting_rank: int) -> list[Finding]:
    """differing: ranks whose config is not that of the reporting rank."""
    if not differing:
        return []
    return [
        error(
            "config.ranks",
            f"{describe_ranks(differing)} loaded no config, or another than rank {reporting_rank}",
            "the ranks would wait for each other in different process groups",
            "give every rank the same file and overrides",
        )
    ]


def judge_shared(places: Mapping[int, tuple[str, int]], hosts: Mapping[int, str]) -> list[Finding]:
    """Whether run_dir is the same directory on all hosts.

    places: by rank, the deepest existing part of run_dir and its inode, which is the same on all clients of a network
    file system. hosts: by rank, as in ``RankInfo.host``.
    """
    first = min(places, default=0)
    different = [rank for rank in places if hosts[rank] != hosts[first] and places[rank] != places[first]]
    if not different:
        return []
    return [
        warning(
            "ranks.run_dir",
            f"{places[different[0]][0]} on {hosts[different[0]].split()[0]} ({describe_ranks(different)}) is another "
            f"directory than {places[first][0]} on {hosts[first].split()[0]}",
            "all hosts write a checkpoint together, so each would miss a part of it",
            "put run_dir on a file system that all hosts mount at the same path",
        )
    ]


def _judge_numbers(hosts: Mapping[str, list[RankInfo]]) -> list[Finding]:
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


def _judge_gpus(infos: Sequence[RankInfo]) -> list[Finding]:
    with_gpu = [info for info in infos if info.gpus]
    if not with_gpu:
        return []
    found = []
    if without := [info.rank for info in infos if not info.gpus]:
        found.append(
            error(
                "ranks.gpus",
                f"{describe_ranks(without)} find{'s' if len(without) == 1 else ''} no GPU, others do",
                "they can't be in one group",
                "check nvidia-smi and CUDA_VISIBLE_DEVICES there",
            )
        )
    if beyond := [info for info in with_gpu if info.local_rank >= info.gpus]:
        found.append(
            error(
                "ranks.gpus",
                f"{describe_ranks([info.rank for info in beyond])}: local rank "
                f"{beyond[0].local_rank} and only {beyond[0].gpus} GPUs",
                "each rank needs its own GPU",
                "lower --nproc-per-node or show more GPUs in CUDA_VISIBLE_DEVICES",
            )
        )
    users = Counter((info.host, info.gpu) for info in with_gpu if info.gpu)
    for (host, gpu), count in users.items():
        if count > 1:
            ranks = [info.rank for info in with_gpu if (info.host, info.gpu) == (host, gpu)]
            found.append(
                error(
                    "ranks.gpus",
                    f"{describe_ranks(ranks)} use the same GPU {gpu} of {host.split()[0]}",
                    "NCCL refuses it, and memory is shared",
                    "set the same CUDA_VISIBLE_DEVICES for all ranks of a host, and LOCAL_RANK to 0, 1, ...",
                )
            )
    return found or [ok("ranks.gpus", f"{len(with_gpu)} ranks, each with its own GPU")]


def _judge_names(hosts: Mapping[str, list[RankInfo]]) -> list[Finding]:
    """gloo publishes the address of the host's name; Megatron creates gloo groups in addition to NCCL's."""
    found = []
    several = len(hosts) > 1
    for members in hosts.values():
        info = members[0]
        loopback = bool(info.addresses) and all(_is_loopback(address) for address in info.addresses)
        if info.interface or (info.addresses and not loopback):
            continue
        problem = (
            f"{info.hostname} resolves to {', '.join(info.addresses)}"
            if info.addresses
            else f"the name {info.hostname} resolves to no address"
        )
        if several:
            found.append(
                error(
                    "ranks.hostnames",
                    problem,
                    "other hosts would connect to themselves instead of to its ranks",
                    "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network's interface, or fix /etc/hosts",
                )
            )
        else:
            found.append(
                note(
                    "ranks.hostnames",
                    problem,
                    "fine on one host; with several, the others could not connect to it",
                    "set GLOO_SOCKET_IFNAME there, or fix /etc/hosts",
                )
            )
    names = Counter(members[0].hostname for members in hosts.values())
    for name, count in names.items():
        if count > 1:
            found.append(
                warning(
                    "ranks.hostnames",
                    f"{count} hosts are called {name}",
                    "their logs and files can't be distinguished, and the name resolves to one of them",
                    "give each host a unique name",
                )
            )
    return found or [ok("ranks.hostnames", "the hosts' names resolve to addresses that are not loopback")]


def _judge_versions(infos: Sequence[RankInfo]) -> list[Finding]:
    found = []
    for package in _SAME:
        versions: dict[str, list[int]] = {}
        for info in infos:
            versions.setdefault(dict(info.versions).get(package, "absent"), []).append(info.rank)
        if len(versions) > 1:
            shown = ", ".join(f"{version} on {describe_ranks(ranks)}" for version, ranks in versions.items())
            found.append(
                error(
                    "ranks.versions",
                    f"{package} differs: {shown}",
                    "ranks that compute differently diverge or hang",
                    "install the same environment on all hosts",
                )
            )
    return found or [ok("ranks.versions", "the same versions on all ranks")]


def _show_hosts(hosts: Mapping[str, list[RankInfo]]) -> str:
    shown = [f"{members[0].hostname} {describe_ranks([info.rank for info in members])}" for members in hosts.values()]
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
