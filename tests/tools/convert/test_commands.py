"""What a conversion finds by itself: the checkpoint of a run, and the source of a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.convert.commands import find_source
from megatron_gspo.tools.convert.torch_dcp_files import METADATA


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
