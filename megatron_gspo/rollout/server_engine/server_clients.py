"""The connections to the servers of a config."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp

from megatron_gspo.config import ServerConfig
from megatron_gspo.servers.http_client import ServerClient
from megatron_gspo.servers.server_launch import read_api_key


def server_clients(
    urls: Sequence[str], session: aiohttp.ClientSession, config: ServerConfig
) -> list[ServerClient]:
    """A client of each server. Raises ValueError for an invalid URL."""
    key = read_api_key(config)
    return [ServerClient(url, session, api_key=key) for url in urls]
