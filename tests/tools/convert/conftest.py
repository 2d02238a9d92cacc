"""A one-layer model as a Hugging Face directory, and its checkpoint chunks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.checkpoint.checkpoint_metadata import (
    CheckpointMetadata,
    checkpoint_metadata,
    write_metadata_files,
)
from megatron_gspo.models import family_of, read_config
from megatron_gspo.tools.convert.to_megatron import to_megatron
from tests.support.distributed import start_fork_server
from tests.support.tiny_models import save_tiny_model


@dataclass(frozen=True)
class Converted:
    """A model in both formats.

    metadata: what Megatron's checkpoint of it holds, in one piece each.
    """

    hugging_face: Path
    megatron: Path
    metadata: CheckpointMetadata


@pytest.fixture(scope="package", autouse=True)
def shared_fork_server() -> None:
    start_fork_server()


@pytest.fixture(scope="package")
def converted(tmp_path_factory) -> Converted:
    folder = tmp_path_factory.mktemp("converted")
    source = Path(save_tiny_model(folder / "hf", "dense", num_hidden_layers=1, vocab_size=95))
    metadata = checkpoint_metadata(*family_of(read_config(source)), ParallelConfig())
    to_megatron(
        source, folder / "megatron", metadata.chunks, metadata.objects, write_metadata_files
    )
    return Converted(source, folder / "megatron", metadata)
