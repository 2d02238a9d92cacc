"""Checks of the servers of a config: whether running ones can serve the run, the version of those
that the run starts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from megatron_gspo.config import Config
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.servers.http_client import ServerClient, ServerError, open_session
from megatron_gspo.servers.server_launch import package_version, read_api_key
from megatron_gspo.tools.doctor.findings import Finding, error, ok
from megatron_gspo.tools.doctor.version_checks import SERVERS, judge_version
from megatron_gspo.weight_transport.server_endpoints import ServerInfo, WeightEndpoints
from megatron_gspo.weight_transport.weight_update import make_transport

_SECONDS = 10.0  # for each request to a server


def query_servers(config: Config) -> dict[str, ServerInfo | str]:
    """By URL: the server's info, or the error of the request."""
    endpoints = SERVER_KINDS[config.rollout.engine].api
    return asyncio.run(_query(config.servers.urls, read_api_key(config.servers), endpoints))


async def _query(
    urls: Sequence[str], key: str | None, endpoints: WeightEndpoints
) -> dict[str, ServerInfo | str]:
    session = await open_session()

    async def query(url: str) -> ServerInfo | str:
        try:
            return await endpoints.server_info(
                ServerClient(url, session, api_key=key), timeout=_SECONDS
            )
        except ServerError as failure:
            return str(failure)

    try:
        return dict(zip(urls, await asyncio.gather(*map(query, urls)), strict=True))
    finally:
        await session.close()


def judge_server(config: Config, url: str, answer: ServerInfo | str) -> list[Finding]:
    """Its version, and whether it can serve the run. answer: as of ``query_servers``."""
    if isinstance(answer, str):
        section = config.servers.section
        why = f"the run waits {section}.recovery_timeout for it, then stops if no other answers"
        return [error("servers.answer", answer, why, f"start it, or fix {section}.urls")]
    software = SERVERS[config.rollout.engine]
    version = judge_version(software, answer.version, gpu=True, where=f" at {url}")
    reason = (
        answer.unusable(
            routes=config.routing.needs_rollout_routes, colocated=config.servers.colocated
        )
        or _unsupported(config, answer)
        or _too_short(config, answer)
    )
    if reason:
        what, _, fix = reason.partition("; ")
        return [version, error("servers.answer", f"{url}: {what}", "it can't serve the run", fix)]
    text = (
        f"{url}: {answer.device}, TP {answer.tp_size}, PP {answer.pp_size}, DP {answer.dp_size},"
        f" serves {answer.model_path}"
    )
    return [version, ok("servers.answer", text)]


def _unsupported(config: Config, server: ServerInfo) -> str:
    """Why the config's weight transport can't serve it, with the fix; "" if it can."""
    endpoints = SERVER_KINDS[config.rollout.engine].api
    transport = make_transport(
        config.servers, endpoints, run_dir=config.run_dir, source=config.model.path
    )
    try:
        return transport.unsupported(server)
    finally:
        transport.close()


def _too_short(config: Config, server: ServerInfo) -> str:
    """Which of the run's sequences it can't hold, with the fix; "" if it holds all."""
    prompt = config.data.max_prompt_length
    longest = prompt + config.rollout.max_response_length
    launch = SERVER_KINDS[config.rollout.engine].launch
    if server.max_input_tokens is not None and prompt > server.max_input_tokens:
        return (
            f"it takes prompts of at most {server.max_input_tokens} tokens, data.max_prompt_length"
            f" = {prompt}; start it with a larger {launch.length_options}, or lower"
            " data.max_prompt_length"
        )
    if server.max_total_tokens is not None and longest > server.max_total_tokens:
        return (
            f"it holds sequences of at most {server.max_total_tokens} tokens, prompt and response"
            f" may take {longest}; start it with more {launch.memory_options}, or lower"
            " rollout.max_response_length"
        )
    return ""


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
