"""What the tests with real servers share: they are skipped without an engine's interpreter, and serve a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.tiny_models import save_tiny_model


def skip_without_python(config: pytest.Config, items: Sequence[pytest.Item], folder: Path, engine: str) -> None:
    """Skip the tests of ``folder`` unless pytest was given ``--ENGINE-python``; engine: in lower case."""
    if config.getoption(f"--{engine}-python") is None:
        skip = pytest.mark.skip(reason=f"needs a real server: make test-{engine}")
        for item in items:
            if folder in item.path.parents:
                item.add_marker(skip)


def python_of(config: pytest.Config, engine: str) -> str:
    """The interpreter that has the engine, as an absolute path."""
    return str(Path(config.getoption(f"--{engine}-python")).absolute())


def save_character_model(folder: Path, **sizes: int) -> str:
    """Write a random float32 Qwen3-MoE of 4 layers with 8 experts, 2 active, and a character tokenizer."""
    tokenizer = character_tokenizer()
    save_tiny_model(folder, vocab_size=-(-len(tokenizer) // 8) * 8, **sizes)
    tokenizer.save_pretrained(folder)
    return str(folder)
