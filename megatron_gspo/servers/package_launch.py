"""`ServerLaunch` of servers of a Python package, which has an environment of its own and is
never imported here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import InputError, first_line
from megatron_gspo.servers.ports import LOOPBACK
from megatron_gspo.servers.server_args import option


@dataclass(frozen=True)
class PackageLaunch:
    """Base of the launches; a subclass adds `command` and `environment`.

    config: number, interpreter, ports, API key and arguments. The arguments follow ours, so they
    override them: `--host` to listen on another address than loopback. model: Hugging Face
    directory. dtype: the servers' `--dtype`. routed_experts: whether servers return them. log_dir:
    directory of `server_<i>.log`. first_gpu: the first server's first GPU, from which on the
    servers take consecutive ones; None: 0, or what the arguments say.

    packages: names under which the package is published. reserved: options that the client decides
    about, and their keys.

    Raises InputError for reserved arguments, and if no server is to be started.
    """

    config: ServerConfig
    model: str
    dtype: str = "auto"
    routed_experts: bool = False
    log_dir: str = "."
    first_gpu: int | None = None
    engine: ClassVar[str]
    exit_causes: ClassVar[tuple[tuple[str, str], ...]]
    packages: ClassVar[tuple[str, ...]]
    reserved: ClassVar[Mapping[str, str]]

    def __post_init__(self) -> None:
        section = self.engine
        for argument in self.args:
            if key := self.reserved.get(argument.split("=", 1)[0]):
                name = argument.split("=", 1)[0]
                raise InputError(f"{section}.server_args: {name} is reserved; set {key} instead")
        if self.config.api_key_file is not None and option(self.args, "--config"):
            raise InputError(
                f"{section}.server_args: --config can't be combined with an API key, which is"
                " passed by it; give its contents as arguments"
            )
        if self.config.num_servers < 1:
            raise InputError(f"{section}.num_servers={self.config.num_servers}: must be at least 1")

    @property
    def args(self) -> tuple[str, ...]:
        """The arguments of the config."""
        return tuple(self.config.server_args)

    @property
    def python(self) -> str:
        """The interpreter that has the package, as an absolute path."""
        return os.path.abspath(self.config.python) if self.config.python else sys.executable

    @property
    def model_path(self) -> str:
        """The model as the servers get it: a directory as an absolute path."""
        return os.path.abspath(self.model) if os.path.isdir(self.model) else self.model

    @property
    def host(self) -> str:
        """Where the servers listen. Any address but loopback can be reached from other machines."""
        return option(self.args, "--host") or LOOPBACK

    @cached_property
    def version(self) -> tuple[int, ...]:
        """The interpreter's version of the package. Raises InputError; see `package_version`."""
        return package_version(self.python, self.packages, self.engine)

    def check(self) -> None:
        """See `ServerLaunch.check`."""
        check_model(self.model, self.engine)
        _ = self.version

    def command(self, index: int, port: int, *, key_file: str | None) -> list[str]:
        """See `ServerLaunch.command`."""
        raise NotImplementedError

    def environment(self, index: int) -> dict[str, str]:
        """See `ServerLaunch.environment`."""
        raise NotImplementedError

    def write_key(self, api_key: str) -> str:
        """See `ServerLaunch.write_key`: a file for `--config`."""
        handle, path = tempfile.mkstemp(prefix=f"{self.engine}-", suffix=".yaml")  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(f"api-key: {json.dumps(api_key)}\n")
        return path

    def after_start(self, url: str, api_key: str | None) -> None:
        """See `ServerLaunch.after_start`."""


def package_version(python: str, packages: tuple[str, ...], section: str) -> tuple[int, ...]:
    """The version of an interpreter's package, such as (0, 5, 15) for 0.5.15.post1. packages: its
    published names.

    Raises InputError if there is no such interpreter or it does not have it.
    """
    lookup = (
        "print(next(d.version for d in m.distributions() if (d.metadata['Name'] or '').lower() in"
        f" {packages!r}))"
    )
    try:
        done = subprocess.run(
            [python, "-c", f"import importlib.metadata as m; {lookup}"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"{first_line(error)}; name an interpreter that has {section}"
        raise InputError(f"{section}.python={python}: {problem}") from error
    if done.returncode:
        problem = f"{section} is not installed there; name an interpreter that has it"
        raise InputError(f"{section}.python={python}: {problem}")
    return release(done.stdout.strip())


def release(version: str) -> tuple[int, ...]:
    """(0, 5, 15) of 0.5.15.post1; () if it does not begin with a number."""
    numbers = re.match(r"[\d.]*\d", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def check_model(model: str, section: str) -> None:
    """Raise InputError for a local path without a model.

    A name on the Hugging Face hub is left to the server.
    """
    local = os.path.exists(model) or model.startswith(("/", ".", "~")) or model.count("/") > 1
    if local and not os.path.isfile(os.path.join(model, "config.json")):
        raise InputError(
            f"{section}: model path {model}: no config.json there; name a Hugging Face model"
            " directory"
        )
