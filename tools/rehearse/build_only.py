"""``--build-only``: every check of a run's start, and Megatron's model of each pipeline stage on
the meta device.

In seconds, in this process, for a world of any size; no step is rehearsed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.mcore.meta_device import meta_model, simulated_rank
from megatron_gspo.mcore.policy import check_megatron_options
from megatron_gspo.models import ModelError, family_of, read_config


@dataclass(frozen=True)
class Stage:
    """What one rank of a pipeline stage holds; the other ranks of the stage hold as much. rank:
    the first one. frozen_parameters: those without a gradient, such as an indexer's.
    """

    stage: int
    rank: int
    layers: int
    parameters: int
    expert_parameters: int
    frozen_parameters: int


def build_stages(config: Config, world_size: int) -> list[Stage]:
    """Check all that training checks before it allocates, and build each pipeline stage's model
    without memory.

    Raises ``ConfigError``, also for what only Megatron refuses.
    """
    config.check(world_size)
    try:
        family, shape = family_of(read_config(config.model.path))
    except ModelError as error:
        raise ConfigError(
            "model.path", config.model.path, str(error), "give another model"
        ) from None
    parallel = config.parallel
    stages = []
    options = check_megatron_options(
        config.megatron, shape, parallel, config.model, config.optimizer, config.routing
    )
    for stage in range(parallel.pipeline_model_parallel_size):
        # Megatron's order: pipeline stages are the outermost
        rank = stage * (world_size // parallel.pipeline_model_parallel_size)
        with simulated_rank(parallel, world_size, rank) as groups:
            assert groups.pp.rank() == stage
            try:
                chunks = meta_model(shape, parallel, config.model, groups, options)
            except (ValueError, AssertionError) as error:
                fix = "change the section parallel or model"
                raise ConfigError(
                    "parallel", asdict(parallel), f"Megatron refuses it: {error}", fix
                ) from None
            named = [item for chunk in chunks for item in chunk.named_parameters()]
            held = Stage(
                stage,
                rank,
                layers=sum(len(chunk.decoder.layers) for chunk in chunks),
                parameters=sum(p.numel() for _, p in named),
                expert_parameters=sum(p.numel() for name, p in named if ".mlp.experts." in name),
                frozen_parameters=sum(p.numel() for _, p in named if not p.requires_grad),
            )
            stages.append(held)
    return stages


def describe_stages(config: Config, world_size: int, stages: list[Stage]) -> str:
    """What each stage holds, for a terminal."""
    parallel = config.parallel
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "ETP": parallel.expert_tensor_size,
        "DP": parallel.data_parallel_size(world_size),
    }
    lines = [
        f"{world_size} processes: "
        + " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    ]
    for stage in stages:
        rest = stage.parameters - stage.expert_parameters
        lines.append(
            f"stage {stage.stage} (rank {stage.rank} and its peers): {stage.layers} layers, "
            f"{stage.parameters / 1e9:.3f} billion parameters per rank "
            f"({stage.expert_parameters / 1e9:.3f} of experts, {rest / 1e9:.3f} others)"
        )
    lines.append(f"{config.optimizer_steps:,} optimizer steps; the config can start")
    return "\n".join(lines)
