"""The text of `--help` and of docs/config.md, generated from the section dataclasses."""

from __future__ import annotations

import itertools
import re

from megatron_gspo.config.fields import Key, keys


def help_text(model: type, usage: str) -> str:
    """The text of `--help`."""
    lines = [usage, "", "Keys of CONFIG.yaml, each with its type, default and meaning:"]
    section = None
    for key in keys(model):
        head = key.name.rpartition(".")[0]
        if head != section:
            lines.append("")
            section = head
        lines.append(
            f"  {key.name}  ({key.type}; default {key.default})".replace(
                "; default required", "; required"
            )
        )
        lines.append(f"      {key.description}")
    return "\n".join(lines)


# `words (docs/page.md)` becomes a link; the words begin after the last point, colon or semicolon.
_LINKED = re.compile(r"([\w`][^;:.()]*) \(docs/(\w+)\.md\)")

_INTRO = """# Config reference

This page lists every config key. `make docs` writes it from the fields in `megatron_gspo/config/`.

A config is one YAML file. `key.sub=value` on the command line overrides it; the value is YAML (`'[1, 4]'` is a list).
Unknown keys, wrong types (`"8"` is not `8`) and contradictions stop the run before any allocation. Paths are relative
to the working directory; `~`, `$NAME` and `${NAME}` in them are expanded. A type is left out where the default shows
it, and where it is a string. `null` is allowed where it is the default. The `config.yaml` of a run is a config too.
"""


def markdown(model: type) -> str:
    """The text of docs/config.md."""
    lines = [_INTRO.rstrip()]
    section_of_row: dict[str, str] = {}
    known_keys: set[str] = set()
    for section, section_keys in itertools.groupby(keys(model), key=_section):
        title = f"## {section}" if section else "## Top level"
        lines += ["", title, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        repeated: dict[str, list[str]] = {}
        for key in section_keys:
            row = _row(key)
            enclosing = section.rpartition(".")[0]
            # A null of a subsection stands for the key of that name around it (`data.sources`).
            if key.default == "null" and f"{enclosing}.{_leaf(key)}" in known_keys:
                earlier = enclosing
            else:
                earlier = section_of_row.setdefault(row, section)
            known_keys.add(key.name)
            if earlier == section:
                lines.append(row)
            else:
                repeated.setdefault(earlier, []).append(f"`{_leaf(key)}`")
        for earlier, names in repeated.items():
            link = f"[{earlier}](#{earlier.replace('.', '')})"
            lines.append(f"| {', '.join(names)} | | | as in {link} |")
    return "\n".join(lines) + "\n"


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _leaf(key: Key) -> str:
    return key.name.rpartition(".")[2]


def _type(key: Key) -> str:
    """The type in the words of a table, without what the default shows; none for a string."""
    text = key.type.replace("true or false", "boolean").replace("one of ", "")
    text = re.sub(r">= (\d+), <= (\d+)", r"\1 to \2", text)
    if key.default in ("null", "by preset", "required"):
        text = text.removesuffix(" or null")
        return "" if text == "string" else text
    if key.default in ("true", "false"):
        return text.removeprefix("boolean").strip()
    if key.default[:1].isdigit():
        return re.sub("^(integer|number) ?", "", text)
    if key.default[:1] == "[":
        return text.removeprefix("list of ")
    if key.default == "{}":
        return text.removeprefix("mapping")
    if key.default[:1] == '"':
        return text.removeprefix("string").strip()
    return text


def _row(key: Key) -> str:
    cells = (
        f"`{_leaf(key)}`",
        _type(key),
        f"`{key.default}`" if key.default != "required" else "required",
        _LINKED.sub(r"[\1](\2.md)", key.description),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
