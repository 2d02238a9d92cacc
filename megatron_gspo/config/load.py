"""From a YAML file and `key.sub=value` overrides to plain data. Every error is a one-line ConfigError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_gspo.config.config_error import MISSING, ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML with YAML 1.2 floats (`1e-6` is a number) and no duplicate keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [getattr(key, "value", None) for key, _ in node.value]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            line = node.value[position][0].start_mark.line + 1
            raise ConfigError(str(key), MISSING, f"appears twice (line {line})", "keep one of them")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; source names the text in the error."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise ConfigError(
            source, MISSING, f"is not YAML{where}: {problem}", "fix the syntax, quote special characters"
        ) from None


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise ConfigError(
            str(path), MISSING, f"cannot read the config: {reason}", "give the path of a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), MISSING, "is not UTF-8 text", "give the path of a YAML file") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(str(path), MISSING, "is not a mapping of keys", "start from a file in examples/")
    return data


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of data with each `key.sub=value` set; values are parsed as YAML. Later ones win."""
    result = _copy(data)
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            fix = "write key.sub=value, e.g. optimizer.lr=1e-6"
            raise ConfigError(override, MISSING, "is not an override", fix)
        if key.startswith("-"):
            raise ConfigError(override, MISSING, "overrides take no dashes", f"write {override.lstrip('-')}")
        _set(result, parts, parse_yaml(text, override))
    return result


_OVERRIDE = re.compile(r"(seed|run_dir|[a-z_]+(\.[a-z_0-9]+)+)=")


def is_override(argument: str) -> bool:
    """Whether a command-line argument has the form `key.sub=value`."""
    return _OVERRIDE.match(argument) is not None


_FOR_SERVERS = re.compile(r"--(sglang|vllm)\.(.*)", re.DOTALL)


def split_server_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(overrides, arguments for the servers by section): `--sglang.xyz value` and `--sglang.xyz=value` are for those of
    `sglang`, as `--xyz value` and `--xyz=value`. A value is a following argument that is no override and starts without
    a dash."""
    ours: list[str] = []
    theirs: dict[str, list[str]] = {}
    after = ""
    for argument in arguments:
        if found := _FOR_SERVERS.fullmatch(argument):
            theirs.setdefault(found[1], []).append("--" + found[2])
            after = "" if "=" in argument else found[1]
        elif after and not argument.startswith("--") and not is_override(argument):
            theirs[after].append(argument)
        else:
            ours.append(argument)
            after = ""
    return ours, theirs


def _set(data: dict[str, Any], parts: list[str], value: Any) -> None:
    for depth, part in enumerate(parts[:-1], start=1):
        inner = data.get(part)
        if inner is None:
            inner = data[part] = {}
        if not isinstance(inner, dict):
            name = ".".join(parts[:depth])
            raise ConfigError(
                ".".join(parts), value, f"{name} is a value, not a section", f"set {name} itself"
            )
        data = inner
    data[parts[-1]] = value


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, dict) else value
