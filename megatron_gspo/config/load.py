"""From a YAML file and `key.sub=value` overrides to plain data.

Every error is a one-line ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_gspo.config.config_error import MISSING, ConfigError
from megatron_gspo.errors import first_line, show_bytes
from megatron_gspo.paths import PathError, expand_path

_MOST_BYTES = 1 << 20  # of a file
_MOST_VALUES = 100_000  # with what each alias stands for written out
_MOST_LEVELS = 64  # of lists and mappings within each other
_TAG = "tag:yaml.org,2002:"
_UNUSABLE = re.compile("[\0\ud800-\udfff]")  # in no path, and in no text that is written
_SHOWN = 60  # characters of an invalid value in a message
# YAML 1.1 reads 010 as 8, 1:30 as 90 and 2026-01-31 as a date: numbers are those of YAML 1.2, dates
# are text.
_REPLACED = tuple(_TAG + name for name in ("int", "float", "timestamp", "value"))
_NOT_IN_A_CONFIG = tuple(_TAG + name for name in ("binary", "omap", "pairs", "set", "timestamp"))
_INTEGER = re.compile(r"^[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^([-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Safe YAML with YAML 1.2 numbers (`1e-6` is one), no dates, no duplicate keys, and a limit
    on nesting.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag not in _NOT_IN_A_CONFIG
    }
    levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.levels += 1
        if self.levels > _MOST_LEVELS:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node


_TOO_DEEP = f"more than {_MOST_LEVELS} levels of lists and mappings"
_Loader.add_implicit_resolver(_TAG + "int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+0123456789."))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [getattr(key, "value", None) for key, _ in node.value]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            line = node.value[position][0].start_mark.line + 1
            raise ConfigError(str(key), MISSING, f"appears twice (line {line})", "keep one of them")
    return loader.construct_mapping(node, deep=True)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    line = f"(line {node.start_mark.line + 1})"
    try:
        number = int(text.replace("_", ""), 0)
    except ValueError:
        number = None  # leading zeros, more digits than Python reads, or !!int with another text
    if number is None and len(text) <= _SHOWN:
        fix = "write it without leading zeros, or in quotes if it is text"
        raise ConfigError(text, MISSING, f"is not an integer {line}", fix)
    if number is None or number.bit_length() > 64:
        raise ConfigError(
            _cut(text), MISSING, f"is a number of more than 64 bits {line}", "write a smaller one"
        )
    return number


_Loader.add_constructor(_TAG + "map", _mapping)
_Loader.add_constructor(_TAG + "int", _integer)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; source names the text in the error."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, source)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise ConfigError(
            source,
            MISSING,
            f"is not YAML{where}: {problem}",
            "fix the syntax, quote special characters",
        ) from None
    except ConfigError:
        raise
    except (ValueError, KeyError) as error:  # of a tag: !!float text, !!bool text
        problem = f"has a value that cannot be read: {first_line(error)}"
        raise ConfigError(source, MISSING, problem, "correct it") from None


def _check_size(node: yaml.Node, source: str) -> None:
    """Refuse a document that its aliases make huge, or that has characters no config needs,
    before it is built.
    """
    values, levels = _size(node, {}, source)
    if values > _MOST_VALUES:
        problem = f"has more than {_MOST_VALUES:,} values with its aliases (*name) written out"
        raise ConfigError(source, MISSING, problem, "write the values that are meant")
    if levels > _MOST_LEVELS:
        raise ConfigError(source, MISSING, f"has {_TOO_DEEP}", "write the values that are meant")


def _size(
    node: yaml.Node, sizes: dict[int, tuple[int, int] | None], source: str
) -> tuple[int, int]:
    """(number of values, levels) of a node.

    sizes: of the nodes so far, by id; None while a node is being counted.
    """
    if id(node) in sizes:
        known = sizes[id(node)]
        if known is None:
            problem = f"has an alias to a value that contains it (line {node.start_mark.line + 1})"
            raise ConfigError(source, MISSING, problem, "write the values that are meant")
        return known
    if isinstance(node, yaml.ScalarNode) and _UNUSABLE.search(node.value):
        problem = (
            f"has a NUL character or half of a surrogate pair (line {node.start_mark.line + 1})"
        )
        raise ConfigError(source, MISSING, problem, "remove it")
    sizes[id(node)] = None
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [item for pair in node.value for item in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    counted = [_size(item, sizes, source) for item in inner]
    values = 1 + sum(count for count, _ in counted)
    levels = 1 + max((depth for _, depth in counted), default=0)
    sizes[id(node)] = (values, levels)
    return values, levels


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    fix = "give the path of a YAML file"
    try:
        with Path(expand_path(str(path))).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8")
    except PathError as error:
        raise ConfigError(str(path), MISSING, error.problem, error.fix) from None
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise ConfigError(str(path), MISSING, f"cannot read the config: {reason}", fix) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), MISSING, "is not UTF-8 text", fix) from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(str(path), MISSING, f"is larger than {show_bytes(_MOST_BYTES)}", fix)
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            str(path), MISSING, "is not a mapping of keys", "start from a file in examples/"
        )
    return data


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of data with each `key.sub=value` set; values are parsed as YAML. Later ones win."""
    result = _copy(data)
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.split(".")
        shown = _cut(override)
        if not equals or not all(names) or len(names) > _MOST_LEVELS:
            fix = "write key.sub=value, e.g. optimizer.lr=1e-6"
            raise ConfigError(shown, MISSING, "is not an override", fix)
        if key.startswith("-"):
            raise ConfigError(
                shown, MISSING, "overrides take no dashes", f"write {shown.lstrip('-')}"
            )
        _set(result, key, parse_yaml(text, shown))
    return result


_OVERRIDE = re.compile(r"(seed|run_dir|[a-z_]+(\.[a-z_0-9]+)+)=")


def is_override(argument: str) -> bool:
    """Whether a command-line argument has the form `key.sub=value`."""
    return _OVERRIDE.match(argument) is not None


_FOR_SERVERS = re.compile(r"--(sglang|vllm)\.(.*)", re.DOTALL)


def split_server_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(overrides, arguments for the servers by section).

    `--sglang.xyz value` and `--sglang.xyz=value` are for the servers of the section `sglang`, as
    `--xyz value` and `--xyz=value`. A value is a following argument that is no override and starts
    without two dashes.
    """
    overrides: list[str] = []
    for_servers: dict[str, list[str]] = {}
    section = ""  # of the option that the next argument may be a value of
    for argument in arguments:
        if match := _FOR_SERVERS.fullmatch(argument):
            section, option = match.groups()
            for_servers.setdefault(section, []).append(f"--{option}")
            if "=" in option:
                section = ""
        elif section and not argument.startswith("--") and not is_override(argument):
            for_servers[section].append(argument)
        else:
            overrides.append(argument)
            section = ""
    return overrides, for_servers


def _set(data: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key; sections that are not there are made."""
    *sections, leaf = key.split(".")
    for depth, name in enumerate(sections, start=1):
        section = data.get(name)
        if section is None:
            section = {}
            data[name] = section
        if not isinstance(section, dict):
            path = ".".join(sections[:depth])
            problem = f"{path} is a value, not a section"
            raise ConfigError(key, value, problem, f"set {path} itself")
        data = section
    data[leaf] = value


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _copy(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _copy(inner) for key, inner in value.items()}
