"""Memory of checkpoints on a GPU: a save stages in pinned buffers that are allocated once, a
load reads in pieces.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_gspo.mcore.checkpoint.owned_state import bytes_of, make_state, pieces_to_write
from megatron_gspo.mcore.checkpoint.save_load import begin_save, load_checkpoint, make_image
from megatron_gspo.mcore.policy import Policy, build_policy
from tests.support.configs import adam, model_config, parallel
from tests.support.tiny_models import save_tiny_model

MOST = 1.2  # times what the rank owns of weights and optimizer


@pytest.fixture(scope="module")
def policy(groups, sizes, tmp_path_factory) -> Policy:
    """In bfloat16, with main weights and moments in float32; the wider the layers, the less
    weighs a load's buffer.
    """
    path = save_tiny_model(
        tmp_path_factory.mktemp("models") / "model", dtype=torch.bfloat16, **sizes.model
    )
    made = build_policy(
        model_config(path, dtype="bfloat16", implementation="torch"),
        parallel(),
        groups,
        optimizer=adam(1e-3),
        total_steps=10,
    )
    make_state(made)
    return made


def test_memory_of_saves_and_a_load(device: str, policy: Policy, tmp_path: Path) -> None:
    owned = bytes_of(pieces_to_write(policy))
    before = _resident(device)
    image = make_image(policy)
    begin_save(policy, tmp_path, 1, {}, keep=1, image=image).finish()
    blocks = image._blocks.used()
    places = [block.data_ptr() for block in blocks]
    # Frames of small tensors.
    assert sum(block.numel() for block in blocks) == image.nbytes <= MOST * owned + 2**20
    assert all(block.is_pinned() == (device == "cuda") for block in blocks)
    saved = begin_save(policy, tmp_path, 2, {}, keep=1, image=image).finish()
    assert [block.data_ptr() for block in image._blocks.used()] == places
    assert _peak(device) - before <= MOST * owned
    before = _resident(device)
    load_checkpoint(policy, saved)
    assert _peak(device) - before <= MOST * owned


def _resident(device: str) -> int:
    """Bytes on the GPU; the peak counts from now."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0
