"""This machine: memory, threads, limits, and the ports that a run listens on."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence

import psutil

from megatron_gspo.config import Config, ServerConfig
from megatron_gspo.errors import show_bytes
from megatron_gspo.servers.ports import LOOPBACK, is_free
from megatron_gspo.servers.server_args import option
from megatron_gspo.tools.doctor.diagnostics import Finding, error, note, ok, warning

_TORCHRUN_PORT = 29500  # of `torchrun --rdzv-endpoint HOST` and of a static rendezvous, where none is named
_FILES = 4096  # descriptors: sockets of every group to every rank, shards, servers' connections
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"


def check_machine(ranks: int, *, gpu: bool) -> list[Finding]:
    """ranks: processes of this run on this machine."""
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        ok("machine.memory", f"{show_bytes(memory.available)} of {show_bytes(memory.total)} available"),
        judge_threads(os.environ.get("OMP_NUM_THREADS"), cores, ranks, gpu=gpu),
        judge_files(files),
    ]


def judge_threads(setting: str | None, cores: int, ranks: int, *, gpu: bool) -> Finding:
    """setting: OMP_NUM_THREADS; without it every process takes a thread for each core."""
    check = "machine.threads"
    if setting is not None and not setting.isdecimal():
        return warning(
            check, f"OMP_NUM_THREADS={setting} is not a number", "threads may be as many as cores", "set it to 1"
        )
    threads = int(setting) if setting else cores
    words = f"OMP_NUM_THREADS={setting}" if setting else f"OMP_NUM_THREADS is not set: {cores} threads a process"
    text = f"{words}, {ranks} process{'es' if ranks > 1 else ''}, {cores} cores"
    if threads * ranks > cores and (threads > 1 or not gpu):
        if threads == 1:
            return note(
                check, text, "processes take turns on the cores", "fine for tests; use fewer processes for speed"
            )
        return warning(
            check,
            text,
            "threads that wait for each other's core can be tens of times slower",
            f"set OMP_NUM_THREADS={max(1, cores // ranks) if gpu else 1}",
        )
    if setting is None and not gpu and cores > 1:
        return note(
            check,
            text,
            "a machine with other work on its cores is many times slower with several threads",
            "set OMP_NUM_THREADS=1 on a CPU",
        )
    return ok(check, text)


def judge_files(limit: int) -> Finding:
    check, unlimited = "machine.files", limit in (-1, resource.RLIM_INFINITY)
    text = f"{'any number of' if unlimited else limit} open files allowed"
    if unlimited or limit >= _FILES:
        return ok(check, text)
    return warning(
        check, text, "connections between ranks, shards and servers need one each", f"ulimit -n {_FILES}, or more"
    )


def check_ports(config: Config | None, environment: Mapping[str, str]) -> list[Finding]:
    """Ports that the run is going to listen on from this rank. What is listened on by then, such as MASTER_PORT of the
    first rank, is found by meeting there."""
    found = []
    if "WORLD_SIZE" not in environment:
        if not is_free("", _TORCHRUN_PORT):
            found.append(
                note(
                    "ports.torchrun",
                    f"port {_TORCHRUN_PORT} is in use",
                    "torchrun listens there where none is named",
                    "give torchrun --rdzv-endpoint HOST:PORT or --master-port, or --standalone",
                )
            )
        else:
            found.append(ok("ports.torchrun", f"port {_TORCHRUN_PORT}, torchrun's default, is free"))
    if config is not None and config.servers.num_servers and config.servers.port is not None:
        host = option(config.servers.server_args, "--host") or LOOPBACK
        ports = range(config.servers.port, config.servers.port + config.servers.num_servers)
        found.append(judge_server_ports(config.servers, host, [port for port in ports if not is_free(host, port)]))
        found += judge_ephemeral(config.servers, ports, _ephemeral_range())
    return found


def judge_server_ports(servers: ServerConfig, host: str, taken: Sequence[int]) -> Finding:
    section, first = servers.section, servers.port
    if not taken:
        return ok(f"ports.{section}", f"the servers' ports from {first} on are free on {host}")
    return error(
        f"ports.{section}",
        f"{section}.port = {first}: {_list(taken)} in use on {host}",
        "the servers could not start",
        f"choose another {section}.port, null for any, or end what listens there",
    )


def judge_ephemeral(
    servers: ServerConfig, ports: Sequence[int], ephemeral: tuple[int, int] | None
) -> list[Finding]:
    """Ports of outgoing connections are taken at any moment, so a server there may find its port in use one day."""
    if ephemeral is None or not (within := [port for port in ports if ephemeral[0] <= port <= ephemeral[1]]):
        return []
    return [
        note(
            "ports.ephemeral",
            f"{servers.section}.port: {_list(within)} among those of outgoing connections "
            f"({ephemeral[0]}-{ephemeral[1]})",
            "another program may hold it when a server starts again",
            f"choose one below {ephemeral[0]}",
        )
    ]


def _list(ports: Sequence[int]) -> str:
    return f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))} {'are' if len(ports) > 1 else 'is'}"


def _ephemeral_range() -> tuple[int, int] | None:
    try:
        with open(_EPHEMERAL, encoding="ascii") as file:
            first, last = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return first, last
