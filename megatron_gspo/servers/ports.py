"""Ports of the servers on this node."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import InputError

LOOPBACK = "127.0.0.1"
# Below Linux' range of ports for outgoing connections
_PORTS = range(30_000, 32_768)


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def choose_ports(
    config: ServerConfig, host: str, *, count: int | None = None, avoid: Sequence[int] = ()
) -> list[int]:
    """A port for each server: config.port + i, which must be free, or free ones, searched from a
    random port on.

    count: servers, None: config.num_servers. Raises InputError.
    """
    count = config.num_servers if count is None else count
    if config.port is not None:
        ports = [config.port + index for index in range(count)]
        for port in ports:
            if not is_free(host, port):
                raise InputError(
                    f"{config.section}.port={config.port}: port {port} is in use on {host}; "
                    "choose another or end the process that listens there"
                )
        return ports
    start = random.SystemRandom().randrange(len(_PORTS))
    free: list[int] = []
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        if port not in avoid and is_free(host, port):
            free.append(port)
            if len(free) == count:
                return free
    searched = f"{_PORTS.start}..{_PORTS.stop - 1}"
    raise InputError(
        f"{config.section}.port: no {count} free ports in {searched}; set it to a free one"
    )
