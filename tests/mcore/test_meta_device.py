"""A simulated rank on the meta device has the parameters of the real rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.meta_device import meta_model, simulated_rank
from megatron_gspo.mcore.model import build_model
from megatron_gspo.mcore.process_groups import initialize, shutdown
from megatron_gspo.models import family_of, read_config
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model

LAYOUTS = {
    "TP 2 x EP 2": (parallel(tensor=2, expert=2), 2),
    "PP 2 x EP 2 x DP 2": (parallel(pipeline=2, expert=2), 4),
    "VP 2 x PP 2": (parallel(pipeline=2, virtual_pipeline=2), 2),
    "ETP 2 x EP 2": (parallel(expert=2, expert_tensor=2), 4),
}


def sizes(chunks) -> list[dict[str, tuple[int, ...]]]:
    return [{name: tuple(p.shape) for name, p in chunk.named_parameters()} for chunk in chunks]


def real(
    rank: int, world_size: int, path: str, layout: ParallelConfig
) -> list[dict[str, tuple[int, ...]]]:
    _, shape = family_of(read_config(path))
    groups = initialize(replace(layout, backend="gloo"), seed=1)
    try:
        return sizes(build_model(shape, layout, model_config(), groups))
    finally:
        shutdown(keep_distributed=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_simulated_rank_has_the_parameters_of_the_real_one(name, tmp_path):
    layout, world = LAYOUTS[name]
    path = save_tiny_model(tmp_path / "model")
    _, shape = family_of(read_config(path))
    wanted = run_distributed(real, world, path, layout)
    for rank in range(world):
        with simulated_rank(layout, world, rank) as groups:
            chunks = meta_model(shape, layout, model_config(), groups)
            assert {p.device.type for chunk in chunks for p in chunk.parameters()} == {"meta"}
            assert sizes(chunks) == wanted[rank]
    assert not dist.is_initialized()
