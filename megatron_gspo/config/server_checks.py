"""Checks of the inference servers and of what only they support. Each raises ConfigError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_gspo.config.config_error import MISSING, ConfigError, show
from megatron_gspo.config.fields import default_of
from megatron_gspo.config.key_files import check_key_file
from megatron_gspo.config.rollout_checks import check_staleness
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.server_sections import ServerConfig
from megatron_gspo.config.server_urls import check_url, without_password

_ASYNCHRONOUS = ("max_staleness", "overlap", "oversampling")


def check_servers(rollout: RolloutConfig, sections: Mapping[str, ServerConfig]) -> None:
    """Servers are named or to be started, their keys have an effect, and none contradicts another.
    sections: of the engines that run in servers, by engine."""
    for name, section in sections.items():
        if name != rollout.engine and section != type(section)():
            problem = (
                f"describes servers, and rollout.engine = {show(rollout.engine)} has none of them"
            )
            raise ConfigError(
                name, MISSING, problem, f"set rollout.engine: {name}, or remove the section"
            )
    if rollout.engine not in sections:
        _check_without_servers(rollout)
        return
    servers = sections[rollout.engine]
    name = rollout.engine
    if bool(servers.urls) == bool(servers.num_servers):
        problem = f"names no server, and neither does {name}.num_servers"
        if servers.urls:
            problem = "both name servers"
        fix = (
            f"set {name}.urls (running servers) or {name}.num_servers (servers to start), one of"
            " them"
        )
        raise ConfigError(f"{name}.urls", servers.urls, problem, fix)
    check_urls(f"{name}.urls", servers.urls)
    check_staleness(rollout, servers)
    _check_timeouts(servers)
    _check_started(servers)
    _check_transport(servers)


def _check_started(servers: ServerConfig) -> None:
    name = servers.section
    if servers.urls:
        for key in ("python", "port", "server_args"):
            if value := getattr(servers, key):
                fix = f"remove it, or set {name}.num_servers in place of {name}.urls"
                raise ConfigError(f"{name}.{key}", value, "is for servers that the run starts", fix)
    if servers.port is not None and servers.port + servers.num_servers - 1 > 65535:
        problem = f"leaves no room for {servers.num_servers} servers"
        raise ConfigError(f"{name}.port", servers.port, problem, "lower it")


def _check_transport(servers: ServerConfig) -> None:
    name = servers.section
    transport = servers.weight_transport
    for key in ("weight_changes_only", "weight_checksums"):
        by_server = key == "weight_checksums" and servers.has_weight_checker
        if getattr(servers, key) and not servers.uses_receiver and not by_server:
            fix = f"set {name}.weight_transport: distributed and {name}.num_servers, or remove it"
            raise ConfigError(
                f"{name}.{key}", True, "needs the receiver of servers that the run starts", fix
            )
    if servers.weight_changes_only and not servers.loads_single_tensors:
        problem = "these servers load a layer from all of its tensors"
        fix = "remove it"
        raise ConfigError(f"{name}.weight_changes_only", True, problem, fix)
    if servers.colocated and transport == "distributed":
        problem = (
            f"servers on the trainer's GPUs ({name}.colocated) can't be in an NCCL group with it"
        )
        fix = f"set it to {servers.colocated_transports}"
        raise ConfigError(f"{name}.weight_transport", transport, problem, fix)
    if servers.weight_dir is not None and transport != "disk":
        problem = f"has no effect with {name}.weight_transport = {show(transport)}"
        raise ConfigError(
            f"{name}.weight_dir",
            servers.weight_dir,
            problem,
            f"set {name}.weight_transport: disk, or remove it",
        )


def _check_timeouts(servers: ServerConfig) -> None:
    name = servers.section
    if servers.health_timeout <= 1:
        problem = "a health check takes a second, in which the server generates a token"
        raise ConfigError(
            f"{name}.health_timeout", servers.health_timeout, problem, "set it to 2 or more"
        )
    if servers.resolved_response_timeout < servers.request_timeout:
        problem = f"is less than the {servers.request_timeout:g} s that one request may take"
        fix = f"raise it, or lower {name}.request_timeout"
        raise ConfigError(f"{name}.response_timeout", servers.response_timeout, problem, fix)


def _check_without_servers(rollout: RolloutConfig) -> None:
    for key in _ASYNCHRONOUS:
        if (value := getattr(rollout, key)) != default_of(RolloutConfig, key):
            problem = f"the engine {rollout.engine} completes each batch before training on it"
            raise ConfigError(
                f"rollout.{key}", value, problem, "set rollout.engine: sglang or vllm, or remove it"
            )


def check_urls(key: str, urls: Sequence[str]) -> None:
    """Each is the URL of a server, and none is there twice. key: that names them."""
    for url in urls:
        try:
            check_url(url)
        except ValueError:
            fix = "write http://host:port; a key goes into api_key_file"
            raise ConfigError(
                key, without_password(url), "is not the URL of a server", fix
            ) from None
    seen: set[str] = set()
    for url in urls:
        if url.rstrip("/") in seen:
            raise ConfigError(key, url, "is listed twice", "list every server once")
        seen.add(url.rstrip("/"))


def check_server_files(servers: ServerConfig) -> None:
    """The interpreter and the key file exist."""
    name = servers.section
    if servers.python is not None and not Path(servers.python).is_file():
        fix = (
            f"give the Python of the environment that {name} is installed in, e.g."
            f" .venv-{name}/bin/python"
        )
        raise ConfigError(f"{name}.python", servers.python, "no such file", fix)
    if servers.api_key_file is not None:
        check_key_file(f"{name}.api_key_file", servers.api_key_file)
