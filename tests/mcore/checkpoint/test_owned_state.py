"""What each rank owns: all ranks together everything once, in even shares, and no more than
that in host memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.mcore.checkpoint.owned_state import bytes_of, pieces_to_read, pieces_to_write
from megatron_gspo.mcore.checkpoint.save_load import make_image, save_checkpoint
from megatron_gspo.mcore.train_step import train_mini_batch
from tests.equivalence.cases import make_samples
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.saved_policies import policy_in
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Large enough that norms and routers, which the first tensor-parallel rank stores, are few."""
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_model(folder / "moe", num_experts=4, vocab_size=2048, hidden_size=64)


def owned(
    rank: int, world_size: int, path: str, folder: str, layout: ParallelConfig, sharded: bool
) -> dict[str, Any]:
    policy = policy_in(path, layout, distributed_optimizer=sharded)
    batch = TrainingBatch.of(make_samples(0, count=4))
    train_mini_batch(policy, batch, preset("sft"), micro_batches_of(64), temperature=1.0)
    image = make_image(policy)
    pieces = pieces_to_write(policy)
    shares: dict[str, Any] = {
        "written": bytes_of(pieces),
        "read": bytes_of(pieces_to_read(policy)),
        "memory": image.nbytes,
        "frames": 1024 * (len(pieces) + 4),
        "refused": "",
    }
    try:
        at = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    except CheckpointError as error:  # a part is missing or there twice
        return shares | {"refused": str(error)}
    return shares | {"file": (at / f"__{rank}_0.distcp").stat().st_size}


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
@pytest.mark.parametrize(
    "layout",
    [parallel(), parallel(tensor=2), parallel(expert=2), parallel(context=2), parallel(pipeline=2)],
    ids=str,
)
def test_the_ranks_divide_everything(model, tmp_path, layout, sharded):
    ranks = run_distributed(owned, 4, model, str(tmp_path), layout, sharded)
    whole = sum(shares["written"] for shares in ranks)
    stages = 2 if layout.pipeline_model_parallel_size == 2 else 1
    for shares in ranks:
        assert shares["refused"] == ""
        assert shares["written"] == pytest.approx(whole / 4, rel=0.1 if stages == 1 else 0.3)
        assert (
            shares["written"]
            <= shares["memory"]
            == shares["file"]
            <= shares["written"] + shares["frames"]
        )
        if sharded:
            assert shares["read"] == pytest.approx(shares["written"], rel=0.1)
