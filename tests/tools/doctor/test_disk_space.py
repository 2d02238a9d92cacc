"""Bytes that a run writes: parameters to the last one, checkpoints as they are on a disk."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.mcore.checkpoint.save_load import save_checkpoint
from megatron_gspo.models import family_of, read_config
from megatron_gspo.tools.doctor.disk_space import Needs, needs
from megatron_gspo.tools.plan.parameters import total_parameters
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.saved_policies import STATE, policy_in
from tests.support.tiny_models import save_tiny_model

PUBLISHED = Path(__file__).parents[3] / "examples" / "qwen3_moe" / "models"


def test_needs_by_hand():
    found = needs(10, weight_bytes=2, keep=2, saves=True, exports=True, weight_copies=2)
    assert found == Needs(checkpoint=140, checkpoints=3, export=20, weights=40)
    assert (found.total, found.smallest) == (3 * 140 + 20 + 40, 2 * 140 + 40)
    assert needs(10, weight_bytes=4, keep=2, saves=False, exports=False).total == 0


def save(rank: int, world: int, path: str, folder: str) -> None:
    save_checkpoint(policy_in(path, parallel(tensor=2)), Path(folder), 1, STATE, keep=1)


def test_a_real_checkpoint_takes_what_is_said(tmp_path):
    path = save_tiny_model(tmp_path / "model", vocab_size=4096, hidden_size=128, num_hidden_layers=1)
    run_distributed(save, 2, path, str(tmp_path / "checkpoints"))
    real = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*") if file.is_file())
    shape = family_of(read_config(path))[1]
    said = needs(total_parameters(shape), weight_bytes=4, keep=0, saves=True, exports=False).total
    assert said == 12 * total_parameters(shape)
    assert 1.0 <= real / said < 1.05  # above it: names and headers of small tensors
