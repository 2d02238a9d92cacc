"""The text of `--help` and of docs/config.md, generated from the section dataclasses."""

from __future__ import annotations

from megatron_gspo.config.fields import keys


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
            f"  {key.name}  ({key.type}; default {key.default})".replace("; default required", "; required")
        )
        lines.append(f"      {key.description}")
    return "\n".join(lines)


_INTRO = """# Config reference

This page lists every config key. `make docs` writes it from the fields in
`megatron_gspo/config/`; edit them there.

A config is one YAML file; `key.sub=value` on the command line overrides it, the value read as YAML (`1e-6` is a number,
`null` is null, `'[1, 4]'` a list). Unknown keys, wrong types (`"8"` is not `8`) and contradictions stop the run before
any allocation. Paths are relative to the working directory; `~`, `$NAME` and `${NAME}` in them are expanded. The
`config.yaml` of a finished run is a config too.
"""


def markdown(model: type) -> str:
    """The text of docs/config.md."""
    lines, section = [_INTRO.rstrip()], None
    for key in keys(model):
        head, _, leaf = key.name.rpartition(".")
        if head != section:
            title = f"## {head}" if head else "## Top level"
            lines += ["", title, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
            section = head
        cells = (
            f"`{leaf}`",
            key.type.replace("true or false", "boolean"),
            f"`{key.default}`" if key.default != "required" else "required",
            key.description,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
