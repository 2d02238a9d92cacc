"""What `LocalServers` needs of an engine to start its servers.

Each engine's is in its folder of `rollout/`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megatron_gspo.config import ServerConfig
from megatron_gspo.launch_environment import without_launch_variables
from megatron_gspo.servers.proxies import around_the_proxy


class ServerLaunch(Protocol):
    """How the servers of one engine are started on this node.

    engine: its name in log lines. host: address that the servers listen on. log_dir: directory of
    `server_<i>.log`. exit_causes: (pattern in a server's log, meaning and fix), the first match
    counts; see `exit_reason`.
    """

    @property
    def engine(self) -> str: ...

    @property
    def exit_causes(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def config(self) -> ServerConfig: ...

    @property
    def host(self) -> str: ...

    @property
    def log_dir(self) -> str: ...

    def check(self) -> None:
        """Raise InputError if the servers can't be started: interpreter, model."""
        ...

    def command(self, index: int, port: int, *, key_file: str | None) -> list[str]:
        """The command line of server `index`.

        key_file: from `write_key`; None without an API key.
        """
        ...

    def environment(self, index: int) -> dict[str, str]:
        """Environment variables of server `index`."""
        ...

    def write_key(self, api_key: str) -> str:
        """Write the API key to a new file that only this user can read; returns its path.
        Deleted once it is read.
        """
        ...

    def after_start(self, url: str, api_key: str | None) -> None:
        """Called when a server answers for the first time after a start."""
        ...


def read_api_key(config: ServerConfig) -> str | None:
    """The API key of the servers, from the first line of its file; None without a file."""
    if config.api_key_file is None:
        return None
    return Path(config.api_key_file).read_text(encoding="utf-8").splitlines()[0].strip()


def server_environment(
    python: str, base: Mapping[str, str] = os.environ, *, host: str = ""
) -> dict[str, str]:
    """The trainer's environment without torchrun's variables and, for another interpreter, without
    Python's paths.

    host: where the server listens, which it reaches without a proxy: SGLang warms up with a request
    to itself.
    """
    # With them it would wait for other ranks at torchrun's store.
    environment = without_launch_variables(base)
    environment["PYTHONSAFEPATH"] = "1"  # `python -m` would search the working directory first
    if python != sys.executable:
        environment = {
            name: value
            for name, value in environment.items()
            if name not in ("PYTHONPATH", "PYTHONHOME")
        }
    return around_the_proxy(environment, host)
