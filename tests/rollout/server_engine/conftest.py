"""A scripted server, and retries without pauses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_gspo.rollout.server_engine import server_pool
from tests.support.sglang_generator import Generator, without_pauses


@pytest.fixture
def server() -> Iterator[Generator]:
    with Generator() as made:
        yield made


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pauses(monkeypatch)
    monkeypatch.setattr(server_pool, "_COOL_DOWN_SECONDS", 0.0)
