"""docs/peers.md names the versions that were compared."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest


@pytest.mark.parametrize(("package", "name"), [("trl", "TRL"), ("verl", "verl")])
def test_the_page_names_the_installed_version(package: str, name: str) -> None:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make test-peers brings it")
    page = Path(__file__).parents[2] / "docs" / "peers.md"
    words = " ".join(page.read_text(encoding="utf-8").split())
    assert f"{name} {version} " in words
