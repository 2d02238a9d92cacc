"""The search ranks what fits and stays within memory."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config import ParallelConfig
from megatron_gspo.gpus import GIB, find_gpu
from megatron_gspo.tools.plan.estimate import Estimator, Hardware
from megatron_gspo.tools.plan.layout_search import search
from tests.support.model_shapes import SMALL, shape_of
from tests.tools.plan.test_estimate import config_of


def estimator(folder: Path, *overrides: str) -> Estimator:
    config = config_of(folder, *overrides, batch=256, prompt=1024, response=4096)
    return Estimator(shape_of(SMALL), config, Hardware(find_gpu("h200"), 8, 0.2, 0.7))


def test_what_fits_is_ranked_and_within_memory(tmp_path: Path) -> None:
    plans = search(estimator(tmp_path), 134 * GIB)
    times = [estimate.seconds for estimate in plans.estimates]
    assert times == sorted(times) and 10 < len(times) < plans.fit <= plans.considered
    assert all(estimate.memory <= 134 * GIB for estimate in plans.estimates)
    layouts = [estimate.choice.parallel for estimate in plans.estimates]
    sizes = {
        (
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            p.context_parallel_size,
            p.expert_model_parallel_size * p.expert_tensor_size,
        )
        for p in layouts
    }
    assert len(sizes) == len(layouts)
    smaller = search(estimator(tmp_path), 75 * GIB)
    assert smaller.fit < plans.fit and smaller.estimates[0].seconds > times[0]


def test_given_keys_are_kept(tmp_path: Path) -> None:
    keys = ("model.recompute_granularity", "training.max_tokens_per_micro_batch")
    kept = estimator(
        tmp_path, f"{keys[0]}=full", f"{keys[1]}=20000", "parallel.overlap_grad_reduce=true"
    )
    plans = search(kept, 134 * GIB, ParallelConfig(expert_model_parallel_size=8), keys)
    (choice,) = [estimate.choice for estimate in plans.estimates]
    assert choice.recompute == "full" and choice.max_tokens == 20_000
    assert choice.parallel.expert_model_parallel_size == 8 and choice.parallel.overlap_grad_reduce
