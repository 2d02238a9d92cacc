"""Checks of the servers of a config: the info of running ones, the version of those that the
run starts.
"""

from __future__ import annotations

import asyncio
import platform
import socket
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from megatron_gspo.config import Config
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.servers.http_client import ServerClient, ServerError, open_session
from megatron_gspo.servers.server_launch import package_version, read_api_key
from megatron_gspo.tools.doctor.findings import Finding, error, ok, warning
from megatron_gspo.tools.doctor.version_checks import SERVERS, judge_version, numbers
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.weight_update import make_transport

_SECONDS = 10.0  # for each request to a server
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ROUTES_ARE_RIGHT_ON_CPU = (0, 5, 23)  # patches/README.md, --disable-overlap-schedule


def query_servers(config: Config) -> dict[str, ServerInfo | str]:
    """By URL: the server's info, or the error of the request."""
    endpoints = SERVER_KINDS[config.rollout.engine].api
    return asyncio.run(_query(config.servers.urls, read_api_key(config.servers), endpoints))


async def _query(
    urls: Sequence[str], key: str | None, endpoints: WeightEndpoints
) -> dict[str, ServerInfo | str]:
    session = await open_session()

    async def one(url: str) -> ServerInfo | str:
        try:
            return await endpoints.server_info(
                ServerClient(url, session, api_key=key), timeout=_SECONDS
            )
        except ServerError as failure:
            return str(failure)

    try:
        return dict(zip(urls, await asyncio.gather(*(one(url) for url in urls)), strict=True))
    finally:
        await session.close()


def judge_servers(config: Config, found: dict[str, ServerInfo | str]) -> list[Finding]:
    """One finding for each usable server, else one for each of its problems.

    found: as of ``query_servers``.
    """
    findings: list[Finding] = []
    for answer in found.values():
        if isinstance(answer, str):
            findings.append(
                error(
                    "servers.answer",
                    answer,
                    f"the run waits {config.servers.section}.recovery_timeout for it, then stops if"
                    " no other answers",
                    f"start it, or fix {config.servers.section}.urls",
                )
            )
        else:
            findings += judge_server(config, answer)
    findings += _judge_together(
        [answer for answer in found.values() if not isinstance(answer, str)]
    )
    return findings + _judge_address(config)


def judge_server(config: Config, server: ServerInfo) -> list[Finding]:
    """Version, routed experts, lengths and weight transport of one server."""
    version = judge_version(
        SERVERS[config.rollout.engine], server.version, gpu=True, where=f" at {server.url}"
    )
    text = (
        f"{server.url}: {server.device}, TP {server.tp_size}, PP {server.pp_size}, DP"
        f" {server.dp_size}, serves {server.model_path}"
    )
    faults = [
        *_judge_responses(server),
        *_judge_memory(config, server),
        *_judge_routes(config, server),
        *_judge_length(config, server),
        *_judge_weight_transport(config, server),
    ]
    return [version, *(faults or [ok("servers.answer", text)])]


def _judge_responses(server: ServerInfo) -> list[Finding]:
    head, _, fix = server.refusal.partition("; ")
    return (
        [error("servers.log_probs", f"{server.url}: {head}", "the run refuses it", fix)]
        if head
        else []
    )


def _judge_memory(config: Config, server: ServerInfo) -> list[Finding]:
    if not config.servers.colocated or not server.keeps_memory:
        return []
    head, _, fix = server.keeps_memory.partition("; ")
    return [error("servers.memory", f"{server.url}: {head}", "the run refuses it", fix)]


def _judge_routes(config: Config, server: ServerInfo) -> list[Finding]:
    if not config.routing.needs_rollout_routes:
        return []
    if not server.routed_experts:
        return [
            error(
                "servers.routes",
                f"{server.url} returns no routed experts",
                "routing.replay = r3 and routing.compare_rollout need them",
                "start it with --enable-return-routed-experts",
            )
        ]
    if reason := server.unusable(routes=True):
        head, _, fix = reason.partition("; ")
        return [
            error(
                "servers.routes",
                f"{server.url}: {head}",
                "replay would train on wrong experts",
                fix,
            )
        ]
    of_sglang = config.rollout.engine == "sglang"
    if of_sglang and server.device == "cpu" and numbers(server.version) < _ROUTES_ARE_RIGHT_ON_CPU:
        return [
            warning(
                "servers.routes",
                f"{server.url}: sglang {server.version} on a CPU returns routed experts that its "
                "next step may have overwritten",
                "replay would silently train on wrong experts",
                "start it with --disable-overlap-schedule",
            )
        ]
    return []


def _judge_length(config: Config, server: ServerInfo) -> list[Finding]:
    prompt = config.data.max_prompt_length
    limit = server.max_input_tokens
    launch = SERVER_KINDS[config.rollout.engine].launch
    if limit is not None and prompt > limit:
        return [
            error(
                "servers.length",
                f"{server.url} takes prompts of at most {limit} tokens, data.max_prompt_length ="
                f" {prompt}",
                "it refuses longer ones",
                f"start it with a larger {launch.length_options}, or lower data.max_prompt_length",
            )
        ]
    longest = prompt + config.rollout.max_response_length
    capacity = server.max_total_tokens
    if capacity is not None and longest > capacity:
        return [
            error(
                "servers.length",
                f"{server.url} holds sequences of at most {capacity} tokens, prompt and response"
                f" may take {longest}",
                "it aborts the longest responses",
                f"start it with more {launch.memory_options}, or lower rollout.max_response_length",
            )
        ]
    return []


def _judge_weight_transport(config: Config, server: ServerInfo) -> list[Finding]:
    servers = config.servers
    endpoints = SERVER_KINDS[config.rollout.engine].api
    transport = make_transport(servers, endpoints, run_dir=config.run_dir, source=config.model.path)
    try:
        reason = transport.unsupported(server)
    finally:
        transport.close()
    if not reason:
        return []
    head, _, fix = reason.partition("; ")
    problem = f"weight_transport = {servers.weight_transport} can't serve it"
    return [error("servers.weights", f"{server.url} {head}", problem, fix)]


def _judge_together(servers: list[ServerInfo]) -> list[Finding]:
    versions = sorted({server.version for server in servers})
    if len(versions) > 1:
        return [
            warning(
                "servers.versions",
                f"the servers run different versions: {', '.join(versions)}",
                "their log-probs of the same tokens may differ",
                "install the same version on all servers",
            )
        ]
    return []


def _judge_address(config: Config) -> list[Finding]:
    """Servers on other machines connect to the trainer at `master_address`."""
    elsewhere = [url for url in config.servers.urls if urlsplit(url).hostname not in _LOOPBACK]
    address = config.servers.master_address
    if config.servers.weight_transport == "distributed" and address in _LOOPBACK and elsewhere:
        return [
            error(
                "servers.address",
                f"{config.servers.section}.master_address = {address}, and {elsewhere[0]} may be on"
                " another machine",
                "at a weight update it would connect to itself instead of the trainer",
                "set an address of the first training node that the servers can reach",
            )
        ]
    return []


def judge_own_address(config: Config) -> list[Finding]:
    """Whether rank 0, in this process, can listen at `master_address`."""
    address = config.servers.master_address
    if config.servers.weight_transport != "distributed" or address is None:
        return []
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(endpoint)
    except OSError as failure:
        reason = (failure.strerror or str(failure)).lower()
        return [
            error(
                "servers.address",
                f"{config.servers.section}.master_address = {address}: rank 0 on {platform.node()}"
                f" can't listen there ({reason})",
                "the servers connect there for the weights, and the run would stop",
                "set an address of rank 0's node; static.sh keeps rank 0 on a given node",
            )
        ]
    return []


def check_startable(config: Config) -> tuple[tuple[int, ...], bool, list[Finding]]:
    """(version, whether on a CPU, findings) of the servers that the run starts.

    Raises InputError.
    """
    servers = config.servers
    launch = SERVER_KINDS[config.rollout.engine].launch
    python = servers.python or sys.executable
    version = package_version(python, launch.packages, servers.section)
    finding = judge_version(
        SERVERS[servers.section], ".".join(map(str, version)), gpu=True, where=f" of {python}"
    )
    return version, launch.on_cpu(servers.server_args), [finding]
