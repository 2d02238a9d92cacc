"""Checks of the SGLang servers and of what only they can do. Each raises ConfigError and returns nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gspo.config.config_error import MISSING, ConfigError, show
from megatron_gspo.config.fields import default_of
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.server_sections import SGLangConfig
from megatron_gspo.config.server_urls import check_url, without_password

if TYPE_CHECKING:
    from megatron_gspo.config.schema import Config

_STREAM_KEYS = ("max_staleness", "overlap", "oversampling")


def check_sglang(config: Config) -> None:
    """The servers are named or to be started, and nothing is set that has no effect or contradicts itself."""
    rollout, sglang = config.rollout, config.sglang
    if rollout.engine != "sglang":
        _refuse_without_servers(rollout, sglang)
        return
    if bool(sglang.urls) == bool(sglang.num_servers):
        problem = "both name servers" if sglang.urls else "names no server, and neither does sglang.num_servers"
        fix = "set sglang.urls (servers that run) or sglang.num_servers (how many to start), one of them"
        raise ConfigError("sglang.urls", sglang.urls, problem, fix)
    _check_urls(sglang.urls)
    _check_stream(config)
    if sglang.health_timeout <= 1:
        problem = "/health takes a second, in which the server generates a token"
        raise ConfigError("sglang.health_timeout", sglang.health_timeout, problem, "set it to 2 or more")
    if sglang.resolved_response_timeout < sglang.request_timeout:
        problem = f"is less than the {sglang.request_timeout:g} s that one request may take"
        fix = "raise it, or lower sglang.request_timeout"
        raise ConfigError("sglang.response_timeout", sglang.response_timeout, problem, fix)
    if sglang.urls:
        for key in ("python", "port", "server_args"):
            if value := getattr(sglang, key):
                fix = "remove it, or set sglang.num_servers in place of sglang.urls"
                raise ConfigError(f"sglang.{key}", value, "is for servers that the run starts", fix)
    if sglang.port is not None and sglang.port + sglang.num_servers - 1 > 65535:
        raise ConfigError("sglang.port", sglang.port, f"leaves no room for {sglang.num_servers} servers", "lower it")
    if sglang.weight_dir is not None and sglang.weight_transport != "disk":
        problem = f"has no effect with sglang.weight_transport = {show(sglang.weight_transport)}"
        fix = "set sglang.weight_transport: disk, or remove it"
        raise ConfigError("sglang.weight_dir", sglang.weight_dir, problem, fix)


def _refuse_without_servers(rollout: RolloutConfig, sglang: SGLangConfig) -> None:
    for key in _STREAM_KEYS:
        if (value := getattr(rollout, key)) != default_of(type(rollout), key):
            problem = f"the engine {rollout.engine} finishes what it begins before anything else happens"
            raise ConfigError(f"rollout.{key}", value, problem, "set rollout.engine: sglang, or remove it")
    if sglang != SGLangConfig():
        problem = f"describes servers, and rollout.engine = {show(rollout.engine)} has none"
        raise ConfigError("sglang", MISSING, problem, "set rollout.engine: sglang, or remove the section")


def _check_urls(urls: Sequence[str]) -> None:
    for url in urls:
        try:
            check_url(url)
        except ValueError:
            fix = "write http://host:port; a key is for api_key_file"
            raise ConfigError("sglang.urls", without_password(url), "is no server", fix) from None
    if twice := [url for i, url in enumerate(urls) if url.rstrip("/") in [u.rstrip("/") for u in urls[:i]]]:
        raise ConfigError("sglang.urls", twice[0], "is there twice", "name every server once")


def _check_stream(config: Config) -> None:
    rollout = config.rollout
    if rollout.overlap and not rollout.max_staleness:
        problem = "what is drawn while training was drawn by weights that are behind by one update"
        raise ConfigError("rollout.overlap", True, problem, "set rollout.max_staleness to 1 or more")
    if rollout.overlap and config.sglang.colocated:
        problem = "the servers have released their memory while the trainer works (sglang.colocated)"
        raise ConfigError("rollout.overlap", True, problem, "set one of the two to false")
    if rollout.max_staleness and rollout.oversampling > 1 + rollout.max_staleness:
        problem = (f"of so many groups the last are trained on {rollout.oversampling - 1:g} steps after their begin, "
                   f"and rollout.max_staleness = {rollout.max_staleness}")
        raise ConfigError("rollout.oversampling", rollout.oversampling, problem,
                          f"set it to {1 + rollout.max_staleness} at most, or raise rollout.max_staleness")
    if rollout.max_staleness and not rollout.overlap and rollout.oversampling == 1:
        problem = "without rollout.overlap and rollout.oversampling nothing is ever behind"
        raise ConfigError("rollout.max_staleness", rollout.max_staleness, problem,
                          "set rollout.overlap: true or rollout.oversampling above 1, or this to 0")


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
