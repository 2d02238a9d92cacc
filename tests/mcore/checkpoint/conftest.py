"""A tiny model."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe", num_experts=4)
