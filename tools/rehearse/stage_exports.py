"""The weights that the other pipeline stages send, from their models without memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.mcore.hf_weights import export_weights
from megatron_gspo.mcore.megatron_options import MegatronOptions
from megatron_gspo.mcore.meta_device import meta_model
from megatron_gspo.mcore.process_groups import initialize, shutdown
from megatron_gspo.models import family_of, read_config
from megatron_gspo.tools.rehearse.collective_log import CollectiveLog
from megatron_gspo.tools.rehearse.fake_world import fake_world
from megatron_gspo.tools.rehearse.host_log import HostLog
from megatron_gspo.tools.rehearse.known_values import KnownValues


class _Sent(Exception):
    """An object that a rank sends to the others."""

    def __init__(self, value: Any) -> None:
        self.value = value


def exports_of_stages(config: Config, options: MegatronOptions, rank: int, world: int) -> list[Any]:
    """What `export_weights` exchanges between the pipeline stages of ``rank``'s pipeline, stage by
    stage; nothing for one stage. Process groups must not be initialized."""
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return []
    per_stage = world // stages  # Megatron's order: pipeline stages are the outermost
    return [
        _export_of(config, options, stage * per_stage + rank % per_stage, world)
        for stage in range(stages)
    ]


def _export_of(config: Config, options: MegatronOptions, rank: int, world: int) -> Any:
    family, shape = family_of(read_config(config.model.path))
    with fake_world(rank, world, CollectiveLog(HostLog(), KnownValues())):
        groups = initialize(config.parallel, seed=config.seed, gloo_groups=False)
        original, dist.all_gather_object = dist.all_gather_object, _send
        try:
            chunks = meta_model(shape, config.parallel, config.model, groups, options)
            next(export_weights(chunks, family, shape, groups), None)
        except _Sent as sent:
            return sent.value
        finally:
            dist.all_gather_object = original
            shutdown(keep_distributed=True)
    raise AssertionError("export_weights exchanges nothing between pipeline stages")


def _send(object_list: Any, obj: Any, group: Any = None) -> None:
    raise _Sent(obj)
