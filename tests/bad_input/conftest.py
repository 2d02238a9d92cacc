"""One tiny model for the whole catalogue."""

from __future__ import annotations

import pytest

from tests.support.training_runs import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("bad_input_model"))
