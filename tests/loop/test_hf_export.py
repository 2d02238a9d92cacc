"""The export of a run: every source writes its part, one rank publishes, an error is every
rank's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.errors import DiskError
from megatron_gspo.loop import hf_export
from megatron_gspo.mcore.policy import build_policy
from megatron_gspo.models.hf_checkpoint import CheckpointReader, write_part
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model


def exports(rank: int, world_size: int, path: str, folder: str) -> tuple[list[str], list[str]]:
    """The published folders, and the errors of two exports in which a rank fails."""
    published = []
    errors = []
    for number, layout in enumerate(
        (parallel(tensor=2, pipeline=2), parallel(pipeline=2, expert=2))
    ):
        policy = build_policy(model_config(path), layout, groups_of(layout), optimizer=None)
        target = Path(folder) / str(number)
        published.append(str(hf_export.export(policy, target)))

    def full(folder: Path, stream: object, *, part: int) -> None:
        if part == 1:
            next(stream)  # type: ignore[call-overload]
            raise DiskError("no space left")
        write_part(folder, stream, part=part)  # type: ignore[arg-type]

    def skipped(folder: Path, stream: object, *, part: int) -> None:
        if part != 2:
            write_part(folder, stream, part=part)  # type: ignore[arg-type]

    for write in (full, skipped):
        hf_export.write_part = write
        with pytest.raises(DiskError) as caught:
            hf_export.export(policy, Path(folder) / "failed")
        errors.append(str(caught.value))
        dist.all_reduce(torch.ones(1))  # the ranks can still communicate
    return published, errors


def test_parts_written_at_once_are_the_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    by_rank = run_distributed(exports, 4, path, str(tmp_path))
    assert all(each == by_rank[0] for each in by_rank)
    truth = load_file(Path(path) / "model.safetensors")
    for folder, files in zip(by_rank[0][0], (2, 4), strict=True):
        assert len(list(Path(folder).glob("*.safetensors"))) == files
        with CheckpointReader(folder) as reader:
            assert reader.names == set(truth)
            assert all(torch.equal(reader.read(name), tensor) for name, tensor in truth.items())
    failed, missing = by_rank[0][1]
    assert failed == "no space left" and "part 3 of 4 is not there" in missing
    assert not (tmp_path / "failed").exists()
