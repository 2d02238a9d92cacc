"""One tiny model with a tokenizer for all tests of the doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_line import small_config
from tests.support.training_runs import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("doctor_model"))


@pytest.fixture
def config_file(model: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes a small config, with sections of one's own; returns its file."""

    def write(**sections: dict[str, Any]) -> Path:
        file = tmp_path / "config.yaml"
        config = small_config(model, tmp_path)
        config |= {name: {**config.get(name, {}), **values} for name, values in sections.items()}
        file.write_text(yaml.safe_dump(config))
        return file

    return write
