"""Every valid layout with its best recomputation and token budget, ranked by the estimated time
of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_gspo.config import ParallelConfig
from megatron_gspo.errors import InputError, show_bytes
from megatron_gspo.models import read_config
from megatron_gspo.tools.plan.estimate import Choice, Estimate, Estimator
from megatron_gspo.tools.plan.layouts import feasible, name_of

RECOMPUTE = ("none", "full")
SEQUENCES = (1, 2, 4, 8)  # of the longest length, in a micro-batch


@dataclass(frozen=True)
class Search:
    """estimates: of the layouts that fit, the fastest first, and of those which differ in VP and
    ETP alone the fastest only. considered, fit: numbers of layouts."""

    estimates: list[Estimate]
    considered: int
    fit: int


def search(
    estimator: Estimator,
    room: float,
    layout: ParallelConfig | None = None,
    given: Collection[str] = (),
) -> Search:
    """Estimate every valid layout, or the one that is named, for ranks with ``room`` bytes. given:
    config keys whose value is kept. Raises ``InputError`` where nothing fits."""
    config = estimator.config
    gpus = estimator.hardware.gpus
    hf = read_config(config.model.path)
    batch = config.training.global_batch_size
    layouts = feasible(hf, gpus, estimator.hardware.gpu.node, batch) if layout is None else [layout]
    if not layouts:
        raise InputError(
            f"--gpus {gpus}: no layout divides the model and the GPUs with at most {batch}"
            " data-parallel ranks (--global-batch-size); raise the batch or take a power of two of"
            " GPUs"
        )
    estimates: list[Estimate] = []
    smallest: Estimate | None = None
    for sizes in layouts:
        candidates = [estimator.estimate(choice) for choice in choices(estimator, sizes, given)]
        fitting = [candidate for candidate in candidates if candidate.memory <= room]
        if fitting:  # of the fastest the largest micro-batch: longer products
            estimates.append(min(fitting, key=lambda each: (each.seconds, -each.choice.max_tokens)))
        least = min(candidates, key=lambda each: each.memory)
        if smallest is None or least.memory < smallest.memory:
            smallest = least
    if not estimates:
        assert smallest is not None
        raise InputError(
            f"--gpus {gpus}: none of {len(layouts)} layouts fits into {show_bytes(room)} of each"
            f" {estimator.hardware.gpu.name}; {name_of(smallest.choice.parallel)} comes closest and"
            f" needs {show_bytes(smallest.memory)}; use more or larger GPUs, or a shorter"
            " --response-length"
        )
    best: dict[tuple[int, ...], Estimate] = {}
    for estimate in sorted(
        estimates, key=lambda each: (each.seconds, each.choice.parallel.expert_tensor_size)
    ):
        best.setdefault(_alike(estimate.choice.parallel), estimate)
    return Search(list(best.values()), len(layouts), len(estimates))


def _alike(parallel: ParallelConfig) -> tuple[int, ...]:
    """Equal for layouts that differ in VP and ETP alone."""
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_size
    return (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        experts,
    )


def choices(
    estimator: Estimator, sizes: ParallelConfig, given: Collection[str]
) -> Iterator[Choice]:
    """What can be chosen for a layout, whose other keys of ``parallel`` are the config's."""
    config = estimator.config
    changed = {field: value for field, value in dataclasses.asdict(sizes).items() if is_size(field)}
    parallel = dataclasses.replace(config.parallel, **changed)
    modes = (
        (config.model.recompute_granularity,)
        if "model.recompute_granularity" in given
        else RECOMPUTE
    )
    budgets = [count * estimator.padded_length(parallel) for count in SEQUENCES]
    if "training.max_tokens_per_micro_batch" in given:
        budgets = [config.training.max_tokens_per_micro_batch]
    for recompute in modes:
        for budget in budgets:
            yield Choice(parallel, recompute, budget)


def is_size(field: str) -> bool:
    """Whether a field of ``ParallelConfig`` is searched."""
    return field.endswith(("_parallel_size", "_in_pipeline_split"))
