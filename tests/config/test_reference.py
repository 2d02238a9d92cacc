"""`--help` and docs/config.md list every key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megatron_gspo.config import Config, from_command_line
from megatron_gspo.config.fields import keys
from megatron_gspo.config.reference import help_text, markdown


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        from_command_line(["--help"], "usage: x")
    assert caught.value.code == 0
    shown = capsys.readouterr().out

    def leaves(schema: dict, prefix: str = "") -> list[str]:
        """Keys of pydantic's JSON schema: a second way to the same list."""
        names = []
        for name, field in schema["properties"].items():
            options = [field, field.get("items", {}), *field.get("anyOf", [])]
            references = [
                option["$ref"].rpartition("/")[2] for option in options if "$ref" in option
            ]
            inner = [whole["$defs"][reference] for reference in references]
            names += leaves(inner[0], f"{prefix}{name}.") if inner else [prefix + name]
        return names

    whole = TypeAdapter(Config).json_schema()
    names = leaves(whole)
    assert len(names) > 80
    listed = [
        line.split()[0] for line in shown.splitlines() if line.startswith("  ") and line[2] != " "
    ]
    assert sorted(listed) == sorted(names)


def test_every_key_has_a_description() -> None:
    assert [key.name for key in keys(Config) if not key.description.rstrip().endswith(".")] == []


def test_reference_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == markdown(Config), "run `make docs`"


def test_every_page_that_a_description_names_is_a_link() -> None:
    assert "(docs/" in help_text(Config, "") and "docs/" not in markdown(Config)
