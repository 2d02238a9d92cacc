"""Checks of the inference servers and of what only they support. Each raises ConfigError."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_gspo.config.config_error import MISSING, ConfigError, show
from megatron_gspo.config.fields import default_of
from megatron_gspo.config.rollout_checks import check_staleness
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.server_sections import SGLangConfig
from megatron_gspo.config.server_urls import check_url, without_password

_ASYNCHRONOUS = ("max_staleness", "overlap", "oversampling")


def check_servers(rollout: RolloutConfig, sglang: SGLangConfig) -> None:
    """Servers are named or to be started, their keys have an effect, and none contradicts another."""
    if rollout.engine != "sglang":
        _check_without_servers(rollout, sglang)
        return
    if bool(sglang.urls) == bool(sglang.num_servers):
        problem = "both name servers" if sglang.urls else "names no server, and neither does sglang.num_servers"
        fix = "set sglang.urls (running servers) or sglang.num_servers (servers to start), one of them"
        raise ConfigError("sglang.urls", sglang.urls, problem, fix)
    _check_urls(sglang.urls)
    check_staleness(rollout, sglang.colocated)
    _check_timeouts(sglang)
    if sglang.urls:
        for key in ("python", "port", "server_args"):
            if value := getattr(sglang, key):
                fix = "remove it, or set sglang.num_servers in place of sglang.urls"
                raise ConfigError(f"sglang.{key}", value, "is for servers that the run starts", fix)
    if sglang.port is not None and sglang.port + sglang.num_servers - 1 > 65535:
        raise ConfigError("sglang.port", sglang.port, f"leaves no room for {sglang.num_servers} servers", "lower it")
    for key in ("weight_changes_only", "weight_checksums"):
        if getattr(sglang, key) and not sglang.uses_receiver:
            fix = "set sglang.weight_transport: distributed and sglang.num_servers, or remove it"
            raise ConfigError(f"sglang.{key}", True, "needs the receiver of servers that the run starts", fix)
    if sglang.colocated and sglang.weight_transport == "distributed":
        problem = "servers on the trainer's GPUs (sglang.colocated) can't be in an NCCL group with it"
        raise ConfigError("sglang.weight_transport", "distributed", problem, "set it to ipc, or to disk")
    if sglang.weight_dir is not None and sglang.weight_transport != "disk":
        problem = f"has no effect with sglang.weight_transport = {show(sglang.weight_transport)}"
        fix = "set sglang.weight_transport: disk, or remove it"
        raise ConfigError("sglang.weight_dir", sglang.weight_dir, problem, fix)


def _check_timeouts(sglang: SGLangConfig) -> None:
    if sglang.health_timeout <= 1:
        problem = "a health check takes a second, in which the server generates a token"
        raise ConfigError("sglang.health_timeout", sglang.health_timeout, problem, "set it to 2 or more")
    if sglang.resolved_response_timeout < sglang.request_timeout:
        problem = f"is less than the {sglang.request_timeout:g} s that one request may take"
        fix = "raise it, or lower sglang.request_timeout"
        raise ConfigError("sglang.response_timeout", sglang.response_timeout, problem, fix)


def _check_without_servers(rollout: RolloutConfig, sglang: SGLangConfig) -> None:
    for key in _ASYNCHRONOUS:
        if (value := getattr(rollout, key)) != default_of(RolloutConfig, key):
            problem = f"the engine {rollout.engine} completes each batch before training on it"
            raise ConfigError(f"rollout.{key}", value, problem, "set rollout.engine: sglang, or remove it")
    if sglang != SGLangConfig():
        problem = f"describes servers, and rollout.engine = {show(rollout.engine)} has none"
        raise ConfigError("sglang", MISSING, problem, "set rollout.engine: sglang, or remove the section")


def _check_urls(urls: Sequence[str]) -> None:
    for url in urls:
        try:
            check_url(url)
        except ValueError:
            fix = "write http://host:port; a key goes into api_key_file"
            raise ConfigError("sglang.urls", without_password(url), "is not the URL of a server", fix) from None
    if twice := [url for i, url in enumerate(urls) if url.rstrip("/") in [u.rstrip("/") for u in urls[:i]]]:
        raise ConfigError("sglang.urls", twice[0], "is listed twice", "list every server once")


def check_server_files(sglang: SGLangConfig) -> None:
    """The interpreter and the key file exist."""
    if sglang.python is not None and not Path(sglang.python).is_file():
        fix = "give the Python of the environment that SGLang is installed in, e.g. .venv-sglang/bin/python"
        raise ConfigError("sglang.python", sglang.python, "no such file", fix)
    if sglang.api_key_file is not None:
        try:
            lines = Path(sglang.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            lines = []
        if not lines or not lines[0].strip():
            problem, fix = "cannot be read, or its first line is empty", "put the key on its first line"
            raise ConfigError("sglang.api_key_file", sglang.api_key_file, problem, fix)
