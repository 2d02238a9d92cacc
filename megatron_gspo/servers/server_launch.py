"""How the servers of an engine are started on this node.

An engine is a Python package in an environment of its own, which is never imported here. Each
engine's launch is in its folder of `rollout/`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from megatron_gspo.config import ServerConfig
from megatron_gspo.config.key_files import read_key
from megatron_gspo.errors import InputError, first_line
from megatron_gspo.launch_environment import without_launch_variables
from megatron_gspo.servers.ports import LOOPBACK
from megatron_gspo.servers.proxies import around_the_proxy


@dataclass(frozen=True)
class ServerLaunch:
    """The servers of one engine.

    Raises InputError for reserved arguments, and if no server is to be started.
    """

    config: ServerConfig
    """Number, interpreter, ports, API key and arguments. The arguments follow ours, so they
    override them: `--host` to listen on another address than loopback."""

    model: str
    """Hugging Face directory of the model."""

    dtype: str = "auto"
    """The servers' `--dtype`."""

    routed_experts: bool = False
    """Whether servers return the routed experts."""

    log_dir: str = "."
    """Directory of the files `server_<i>.log`."""

    first_gpu: int | None = None
    """The first server's first GPU, from which on the servers take consecutive ones; None: 0, or
    what the arguments say."""

    engine: ClassVar[str]
    """Name of the engine, and of its config section."""

    packages: ClassVar[tuple[str, ...]]
    """Names under which the package is published."""

    reserved: ClassVar[Mapping[str, str]]
    """Options that the client decides about, and their keys."""

    exit_causes: ClassVar[tuple[tuple[str, str], ...]]
    """(pattern in a server's log, meaning and fix), the first match counts; see `exit_reason`."""

    gpu_option: ClassVar[str] = ""
    """The argument that sets a server's first GPU; "" if there is none."""

    config_option: ClassVar[str]
    """The argument whose JSON changes the model's config."""

    length_options: ClassVar[str]
    """The arguments that set the longest sequence, for messages."""

    memory_options: ClassVar[str]
    """The arguments that set the size of the KV cache, for messages."""

    @staticmethod
    def on_cpu(args: Sequence[str]) -> bool:
        """Whether servers with these arguments run without a GPU."""
        raise NotImplementedError

    @staticmethod
    def gpus_per_server(args: Sequence[str]) -> int:
        """Number of GPUs of a server with these arguments. Raises InputError for an invalid
        size.
        """
        raise NotImplementedError

    @classmethod
    def adapter_args(cls, rank: int, targets: Sequence[str], args: Sequence[str]) -> list[str]:
        """Further arguments of a server with these that gets LoRA adapters alone.

        targets: the linear layers that have one.
        """
        raise NotImplementedError

    def command(self, index: int, port: int, *, key_file: str | None) -> list[str]:
        """The command line of server `index`.

        key_file: from `write_key`; None without an API key.
        """
        raise NotImplementedError

    def environment(self, index: int) -> dict[str, str]:
        """Environment variables of server `index`."""
        raise NotImplementedError

    def after_start(self, url: str, api_key: str | None) -> None:
        """Called when a server answers for the first time after a start."""

    @classmethod
    def quantized_args(cls, quantization: Mapping[str, Any]) -> list[str]:
        """The arguments of a server whose model has this `quantization_config`, and no weights
        until the first update.
        """
        config = json.dumps({"quantization_config": quantization})
        return [cls.config_option, config, "--load-format", "dummy"]

    def __post_init__(self) -> None:
        section = self.engine
        for argument in self.args:
            name = argument.split("=", 1)[0]
            if key := self.reserved.get(name):
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
        """Raise InputError if the servers can't be started: interpreter, model."""
        check_model(self.model, self.engine)
        _ = self.version

    def write_key(self, api_key: str) -> str:
        """Write the API key to a new file for `--config` that only this user can read; returns
        its path. Deleted once it is read.
        """
        handle, path = tempfile.mkstemp(prefix=f"{self.engine}-", suffix=".yaml")  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(f"api-key: {json.dumps(api_key)}\n")
        return path


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
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


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


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of an option, given as `--name value` or `--name=value`; None if it is not
    given.
    """
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == name:
            value = following
        elif argument.startswith(f"{name}="):
            value = argument.split("=", 1)[1]
    return value


def product_of_sizes(
    server_args: Sequence[str], sizes: Sequence[Sequence[str]], section: str
) -> int:
    """The product of parallel sizes in a server's arguments. sizes: the names of each option, the
    full one first.

    Raises InputError for an invalid size.
    """
    count = 1
    for names in sizes:
        values = [option(server_args, name) for name in names]
        value = next(filter(None, values), "1")
        if not value.isdecimal() or not int(value):
            raise InputError(
                f"{section}.server_args: {names[0]} {value}: must be a positive number"
            )
        count *= int(value)
    return count


def first_server_gpu(
    servers: ServerConfig,
    gpus_per_server: int,
    *,
    trainer_gpus: int,
    visible_gpus: int,
    option_name: str,
) -> int:
    """Index of the first server's first GPU; the servers take consecutive GPUs from it on.

    Raises InputError if a server would share a GPU with the trainer and is not colocated, or if
    there are too few.

    Args:
        option_name: of the servers, which sets it; else it is the first GPU that no rank of this
            node uses, or 0 if colocated.
        trainer_gpus: ranks on this node, which use the GPUs 0 .. trainer_gpus-1.
        visible_gpus: of this node.
    """
    section = servers.section
    default = 0 if servers.colocated else trainer_gpus
    index = option(servers.server_args, option_name) if option_name else None
    if index is not None and not index.isdecimal():
        raise InputError(f"{section}.server_args: {option_name} {index}: must be a GPU's index")
    first = default if index is None else int(index)
    end = first + servers.num_servers * gpus_per_server
    if first < trainer_gpus and not servers.colocated:
        raise InputError(
            f"{section}.server_args: {option_name} {first}: the trainer uses the GPUs 0 to"
            f" {trainer_gpus - 1}; set {option_name} to {trainer_gpus} or more, or"
            f" {section}.colocated=true"
        )
    if end > visible_gpus:
        raise InputError(
            f"{section}.num_servers={servers.num_servers}: the servers need the GPUs {first} to"
            f" {end - 1}, this node has {visible_gpus}; use fewer ranks or servers, {section}.urls"
            f" of other nodes, or {section}.colocated=true"
        )
    return first


def read_api_key(config: ServerConfig) -> str | None:
    """The API key of the servers, from the first line of its file; None without a file."""
    if config.api_key_file is None:
        return None
    return read_key(config.api_key_file)


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
