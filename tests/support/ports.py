"""Free ports for servers and rendezvous of tests."""

from __future__ import annotations

import secrets
import socket

# Below those that Linux gives to outgoing connections, which could take it meanwhile.
FIRST = 20_000
COUNT = 12_000


def free_port() -> int:
    """A port of this host that nothing listens on."""
    while True:
        port = FIRST + secrets.randbelow(COUNT)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
