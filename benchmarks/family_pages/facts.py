"""What a page says of its family that no config and no result has: ``facts.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Variant:
    """A published model. like: others of the same sizes, which take the same configs; others: of
    the same ``type`` with other sizes. folder: its name in ``examples/*/models`` and in configs.
    """

    repository: str
    type: str
    files: str
    folder: str = ""
    like: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder or self.repository.partition("/")[2]

    @property
    def config(self) -> Path | None:
        """The folder with its config.json, if examples/ has one."""
        return next(EXAMPLES.glob(f"*/models/{self.name}"), None)


@dataclass(frozen=True)
class FamilyFacts:
    """A page. about: a sentence; download: text below the commands; engines, proven: text of these
    sections; models: of ``tests.equivalence.layouts.MEASURED``; prepare: commands between the
    download and the start.
    """

    page: str
    title: str
    about: str
    variants: tuple[Variant, ...]
    download: str
    engines: str
    proven: str
    models: tuple[str, ...]
    prepare: tuple[str, ...] = ()


def read_facts() -> list[FamilyFacts]:
    """All pages, in their order."""
    data: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("facts.yaml").read_text(encoding="utf-8")
    )
    pages = []
    for page, facts in data.items():
        variants = tuple(
            Variant(**{key: _frozen(value) for key, value in variant.items()})
            for variant in facts.pop("variants")
        )
        texts = {key: _frozen(value) for key, value in facts.items()}
        pages.append(FamilyFacts(page=page, variants=variants, **texts))
    return pages


def _frozen(value: str | list[str]) -> str | tuple[str, ...]:
    return value.strip() if isinstance(value, str) else tuple(value)
