"""What a conversion finds by itself: the checkpoint of a run, and the source of a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_gspo.errors import InputError
from megatron_gspo.tools.convert.__main__ import DTYPES
from megatron_gspo.tools.convert.commands import chunks_of, find_checkpoint, find_source
from megatron_gspo.tools.convert.to_megatron import COMPANIONS
from megatron_gspo.tools.convert.torch_dcp_files import METADATA


def test_a_distributed_checkpoint_is_taken_as_given(converted):
    assert find_checkpoint(converted.megatron) == converted.megatron


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(
        InputError, match="is neither a distributed checkpoint nor a run directory with one"
    ):
        find_checkpoint(tmp_path)


def test_a_checkpoint_s_own_copy_of_the_config_comes_first(converted):
    assert find_source(converted.megatron, converted.megatron) == converted.megatron / COMPANIONS


@pytest.mark.parametrize("given", ["run", "checkpoint"])
def test_a_run_s_checkpoint_has_the_run_s_model(given, converted, tmp_path: Path):
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    shutil.copy(converted.megatron / METADATA, checkpoint)
    (tmp_path / "config.yaml").write_text(f"model: {{path: {converted.hugging_face}}}\n")
    assert (
        find_source(tmp_path if given == "run" else checkpoint, checkpoint)
        == converted.hugging_face
    )
    (tmp_path / "config.yaml").write_text(f"model: {{path: {tmp_path / 'moved'}}}\n")
    with pytest.raises(
        InputError, match="config.yaml: model.path=.*moved does not exist; pass --source DIR"
    ):
        find_source(tmp_path, checkpoint)


def test_without_a_config_the_source_must_be_given(tmp_path):
    with pytest.raises(
        InputError, match="has no copy of its model's config.json; pass --source DIR"
    ):
        find_source(tmp_path / "a" / "b", tmp_path / "a" / "b")


def test_chunks_hold_each_parameter_whole(converted):
    chunks = chunks_of(converted.hugging_face)
    assert chunks == converted.metadata.chunks
    stored = {
        name: sum(c.numel for c in chunks if name in c.part.names)
        for c in chunks
        for name in c.part.names
    }
    parts = {name: c.part.sizes for c in chunks for name in c.part.names}
    assert all(count == torch.Size(parts[name]).numel() for name, count in stored.items())


def test_the_choices_of_a_type_are_torch_s():
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)
